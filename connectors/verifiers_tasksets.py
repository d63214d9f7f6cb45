"""Environments of verifiers from 0.3 on: a Taskset yields tasks, an Env plays them, a Trace carries the rewards.

Goes in: the wire form of a task's data, from which the task is built anew as verifiers' own server does; comes out:
episodes of one agent. Which program plays the agent and where it runs is the package's and the description's business
(``settings.agent``); the policy is the endpoint.
"""

import importlib
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from headrace.connectors.verifiers import COLUMN, KEY_VARIABLE, Description, Played
from headrace.connectors.verifiers_classic import message_texts
from headrace.schemas.errors import ConfigurationError

__all__ = ("TasksetPackage",)


class TasksetPackage:
    """See ``verifiers.Package``."""

    def __init__(self, description: Description) -> None:
        try:
            self._v1: Any = importlib.import_module("verifiers.v1")
        except ImportError as error:
            raise ConfigurationError(
                f"{description.environment} has no load_environment, and this verifiers has no tasksets ({error}): "
                "pip install 'verifiers>=0.3'"
            ) from error
        if not hasattr(self._v1, "resolve_env_config"):
            raise ConfigurationError(
                f"{description.environment} is a taskset, which this verifiers cannot play: "
                "pip install 'verifiers>=0.3'"
            )
        if description.split != "train":
            raise ConfigurationError(
                f"taskset {description.environment} has one set of tasks: choose other ones by settings.taskset, "
                "not by split"
            )
        self._description = description
        settings = description.settings
        given = {**settings, "taskset": {**settings.get("taskset", {}), "id": description.environment}}
        self._config: Any = self._v1.resolve_env_config(given)
        self._environment: Any = None

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """One row for each task. Raises ConfigurationError for a taskset without end and without ``limit``."""
        taskset = self._v1.load_taskset(self._config.taskset)
        limit = self._description.limit
        if taskset.INFINITE and not limit:
            raise ConfigurationError(
                f"taskset {self._description.environment} has no end: set limit in its description"
            )
        for number, task in enumerate(itertools.islice(taskset, limit or None)):
            data = task.data.model_dump(mode="json", exclude_none=True)
            prompt, system = data.get("prompt"), data.get("system_prompt")
            if system:
                said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
                prompt = [{"role": "system", "content": system}, *said]
            name = data.get("name") or data.get("description") or f"{self._description.environment} task {number}"
            yield {"prompt": message_texts(prompt, name), "answer": str(data.get("answer", "")), COLUMN: data}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """The environment with the servers that its episodes share."""
        self._environment = self._v1.load_environment(self._config)
        async with self._environment.serving():
            yield

    async def play(self, row: Mapping[str, Any], base_url: str) -> Played:
        """An episode and its score."""
        environment = self._environment
        kind = type(environment.taskset).task_type()
        task = kind(kind.data_type().model_validate(dict(row)), self._config.taskset.task)
        client = self._v1.EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE)
        (slot,) = environment.slots(task)
        episode = await environment.run_slot(slot, self._v1.ModelContext(model="policy", client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            return Played(error="; ".join(f"{e.type}: {e.message}" for e in errors) or "the episode did not complete")
        if len(episode.traces) != 1:
            return Played(error=f"{len(episode.traces)} agents played the episode; one is what can be trained here")
        (trace,) = episode.traces
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        if not rewards:
            return Played(error="the task gave no reward")
        return Played(rewards=rewards, metrics=_numbers(trace.metrics), completion=trace.last_reply)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
