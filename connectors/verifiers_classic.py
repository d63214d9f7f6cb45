"""Environments of verifiers up to 0.3: ``load_environment``, a Hugging Face dataset, a rollout, a Rubric.

Goes in: rows of ``get_dataset``; comes out: episodes by ``run_rollout``, whose reward is the Rubric's weighted sum and
whose metrics are the values of its functions. An environment whose Rubric scores whole groups at once is refused: each
episode is a task of its own here.
"""

import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from headrace.connectors.verifiers import COLUMN, KEY_VARIABLE, Description, Played
from headrace.schemas.errors import ConfigurationError

__all__ = ("ClassicPackage", "message_texts")


class ClassicPackage:
    """See ``verifiers.Package``. Raises ConfigurationError for an environment that scores groups."""

    def __init__(self, verifiers: Any, description: Description) -> None:
        self._description = description
        self._client_config = verifiers.ClientConfig
        self._environment = verifiers.load_environment(description.environment, **description.settings)
        if getattr(self._environment, "requires_group_rollouts", False):
            raise ConfigurationError(
                f"verifiers environment {description.environment} scores the rollouts of a group together; here each "
                "is scored by itself. Take a rubric without group rewards, or a group_reward of the stream"
            )

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """The rows of the split, in the dataset's order."""
        environment, limit = self._environment, self._description.limit or -1
        table = environment.get_eval_dataset if self._description.split == "eval" else environment.get_dataset
        for number, row in enumerate(table(n=limit)):
            yield {
                "prompt": message_texts(row["prompt"], f"{self._description.environment} row {number}"),
                "answer": row.get("answer") or "",
                "task_type": row.get("task") or "",
                COLUMN: dict(row),
            }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Nothing runs beside the episodes."""
        yield

    async def play(self, row: Mapping[str, Any], base_url: str) -> Played:
        """A rollout and its score."""
        client = self._client_config(
            client_type="openai_chat_completions", api_base_url=base_url, api_key_var=KEY_VARIABLE, max_retries=0
        )
        made = await self._environment.run_rollout(dict(row), client, "policy", {}, state_columns=[])
        if made.get("error"):
            return Played(error=_error_text(made["error"]))
        metrics = {str(n): float(v) for n, v in (made.get("metrics") or {}).items() if isinstance(v, int | float)}
        reward = made.get("reward")
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            return Played(error=f"its rubric gave {reward!r}, no finite number", metrics=metrics)
        completion = made.get("completion")
        last = completion[-1] if isinstance(completion, list) and completion else {}
        text = completion if isinstance(completion, str) else str(last.get("content") or "")
        return Played(rewards={"rubric": float(reward)}, metrics=metrics, completion=text)


def message_texts(prompt: Any, instead: str) -> Any:
    """A prompt as people and the checks of a dataset read it: text, or messages with text; ``instead`` for none."""
    if isinstance(prompt, str):
        return prompt if prompt.strip() else instead
    messages = [{"role": str(m.get("role", "user")), "content": _text(m.get("content"))} for m in prompt or ()]
    return messages if any(m["content"].strip() for m in messages) else instead


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))


def _error_text(error: Any) -> str:
    """What went wrong, however a version tells it: a mapping with a chain, or an exception."""
    if isinstance(error, Mapping):
        return str(error.get("error_chain_str") or error.get("error_chain_repr") or error.get("error") or dict(error))
    return str(error) or repr(error)
