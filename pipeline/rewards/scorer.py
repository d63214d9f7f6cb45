"""Scores completions by the reward that a prompt names: inline where that is safe, else beside the worker, in time.

Goes in: a prompt and a completion, or all completions of a group; comes out: named Reward parts, or RewardFailed. All
rewards of a run are loaded (or refused) when the scorer is made, so a wrong name or option ends the worker before
anything is sampled.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.pipeline.evaluation import EVALUATION_STREAM
from headrace.pipeline.rewards.pool import RewardPool
from headrace.pipeline.rewards.reward import (
    Completion,
    Graded,
    RewardFailed,
    RewardOptions,
    call_group_reward,
    call_reward,
    load_reward,
)
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Reward
from headrace.schemas.records import Prompt

__all__ = ("Scorer",)

_THREADS = 32
"""Calls at a time of rewards that wait for a server."""


class Scorer:
    """The rewards of a run. Raises ConfigurationError for an unknown reward of a stream or of evaluation."""

    def __init__(self, config: RunConfig) -> None:
        self._options: dict[str, Mapping[str, Any]] = {n: s.reward_options for n, s in config.streams.items()}
        first = next(iter(config.streams.values()))
        self._options[EVALUATION_STREAM] = config.eval.reward_options if config.eval.reward else first.reward_options
        self._group_options = {n: s.group_reward_options for n, s in config.streams.items()}
        self._group_rewards = {n: s.group_reward for n, s in config.streams.items()}
        self._pool: RewardPool | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._spent: Counter[str] = Counter()
        self._loaded: dict[tuple[str, str, bool], Any] = {}
        for name, section in config.streams.items():
            if not section.reward_column:
                self._reward(section.reward, name)
            if section.group_reward:
                self._reward(section.group_reward, name, group=True)
        if config.eval.reward:
            try:
                self._reward(config.eval.reward, EVALUATION_STREAM)
            except ConfigurationError as error:
                raise ConfigurationError(str(error).replace("streams.S.", "eval.")) from error

    async def score(self, prompt: Prompt, completion: Completion, *, role: str = "") -> list[Reward]:
        """Reward parts of one completion; ``role`` marks them as that role's own. Raises RewardFailed.

        A reward of group scope gives none: it is asked once the group has its members.
        """
        reward = self._reward(prompt.reward, prompt.stream)
        if getattr(reward, "scope", "trajectory") == "group":
            return []
        options = self._options.get(prompt.stream, {})
        parts: Graded = await self._called(call_reward, prompt.reward, reward, options, prompt, completion)
        return [Reward(name=n, value=v, role=role, detail=parts.details.get(n, "")) for n, v in parts.items()]

    async def score_group(self, prompt: Prompt, completions: Sequence[Completion]) -> list[list[Reward] | RewardFailed]:
        """Reward parts of every completion of a group, or why it has none. Raises RewardFailed when none has any."""
        name = self._group_rewards.get(prompt.stream) or prompt.reward
        group = bool(self._group_rewards.get(prompt.stream))
        reward = self._reward(name, prompt.stream, group=group)
        if getattr(reward, "scope", "trajectory") != "group":
            raise RewardFailed(f"no group-scope reward: {name!r} scores single trajectories")
        options = (self._group_options if group else self._options).get(prompt.stream, {})
        values = await self._called(call_group_reward, name, reward, options, prompt, list(completions))
        return [
            v if isinstance(v, RewardFailed)
            else [Reward(name=n, value=x, detail=v.details.get(n, "")) for n, x in v.items()]
            for v in values
        ]  # fmt: skip

    def spent(self) -> dict[str, float]:
        """What rewards in threads have used up since this was asked last: requests, tokens and cost of judges."""
        total: Counter[str] = Counter()
        for reward in self._loaded.values():
            total.update(getattr(reward, "spent", {}))
        new, self._spent = total - self._spent, total
        return {name: float(amount) for name, amount in new.items()}

    def close(self) -> None:
        """End the processes of the pool, and wait for no thread."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        if self._pool is not None:
            self._pool.close()

    async def _called(
        self, call: Any, name: str, reward: Any, options: Mapping[str, Any], prompt: Prompt, completions: Any
    ) -> Any:
        """One call of a reward where it belongs: here, in a thread, or in a process of the pool."""
        isolation = getattr(reward, "isolation", "process")
        if isolation == "inline":
            return call(name, reward, prompt, completions)
        timeout = _seconds(reward, options)
        if isolation == "thread":
            # threads of their own: one that hangs must not keep the worker from reading, writing and ending
            self._threads = self._threads or ThreadPoolExecutor(_THREADS, "waiting-reward")
            try:
                async with asyncio.timeout(timeout):
                    loop = asyncio.get_running_loop()
                    return await loop.run_in_executor(self._threads, call, name, reward, prompt, completions)
            except TimeoutError:
                raise RewardFailed(f"reward {name} did not return within {timeout:g} s") from None
        if self._pool is None:
            self._pool = RewardPool(max(2, min(8, os.cpu_count() or 1)))
        return await self._pool.call(name, options, prompt, completions, timeout)

    def _reward(self, name: str, stream: str, *, group: bool = False) -> Any:
        key = (name, stream, group)
        if key not in self._loaded:
            options = (self._group_options if group else self._options).get(stream, {})
            self._loaded[key] = load_reward(name, options)
        return self._loaded[key]


def _seconds(reward: Any, options: Mapping[str, Any]) -> float:
    """Time for one call: the given one, else the reward's own default, else that of all rewards."""
    fields = {**RewardOptions.model_fields, **getattr(reward, "Options", RewardOptions).model_fields}
    return float(options.get("timeout_seconds", fields["timeout_seconds"].default))
