"""Scores completions by the reward that a prompt names: inline where that is safe, else in the pool, with a deadline.

Goes in: a prompt and a completion; comes out: named Reward parts, or RewardFailed. All rewards of a run are loaded (or
refused) when the scorer is made, so a wrong name or option ends the worker before anything is sampled.
"""

import os
from collections.abc import Mapping
from typing import Any

from headrace.pipeline.evaluation import EVALUATION_STREAM
from headrace.pipeline.rewards.pool import RewardPool
from headrace.pipeline.rewards.reward import Completion, call_reward, load_reward
from headrace.schemas.config import RunConfig
from headrace.schemas.parts import Reward
from headrace.schemas.records import Prompt

__all__ = ("Scorer",)


class Scorer:
    """The rewards of a run. Raises ConfigurationError for an unknown reward of a stream or of evaluation."""

    def __init__(self, config: RunConfig) -> None:
        self._options: dict[str, Mapping[str, Any]] = {n: s.reward_options for n, s in config.streams.items()}
        self._options[EVALUATION_STREAM] = next(iter(config.streams.values())).reward_options
        self._pool: RewardPool | None = None
        self._loaded: dict[tuple[str, str], Any] = {}
        for name, section in config.streams.items():
            if not section.reward_column:
                self._reward(section.reward, name)
        if config.eval.reward:
            self._reward(config.eval.reward, EVALUATION_STREAM)

    async def score(self, prompt: Prompt, completion: Completion, *, role: str = "") -> list[Reward]:
        """Reward parts of one completion; ``role`` marks them as that role's own. Raises RewardFailed."""
        reward = self._reward(prompt.reward, prompt.stream)
        if getattr(reward, "isolation", "process") == "inline":
            parts = call_reward(prompt.reward, reward, prompt, completion)
        else:
            options = self._options.get(prompt.stream, {})
            if self._pool is None:
                self._pool = RewardPool(max(2, min(8, os.cpu_count() or 1)))
            timeout = float(options.get("timeout_seconds", 10.0))
            parts = await self._pool.call(prompt.reward, options, prompt, completion, timeout)
        return [Reward(name=name, value=value, role=role) for name, value in parts.items()]

    def close(self) -> None:
        """End the processes of the pool."""
        if self._pool is not None:
            self._pool.close()

    def _reward(self, name: str, stream: str) -> Any:
        key = (name, stream)
        if key not in self._loaded:
            self._loaded[key] = load_reward(name, self._options.get(stream, {}))
        return self._loaded[key]
