"""Keep the groups whose mean reward lies within bounds: prompts that are neither too hard nor too easy.

``low <= mean(reward of counted members) <= high``, each bound left out or given. With rewards 0 and 1 the mean is the
share of right answers; this is the online prompt filtering of PRIME (Cui et al. 2025, arXiv 2502.01456), there with
0.2 and 0.8.
"""

from collections.abc import Sequence
from math import isfinite
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from headrace.pipeline.operators.operator import (
    GroupDraft,
    Kind,
    OperatorConfiguration,
    OperatorContext,
    mean_and_deviation,
)

__all__ = ("RewardRange", "RewardRangeConfiguration")


class RewardRangeConfiguration(OperatorConfiguration):
    """``low``, ``high``: bounds of the mean, both included; one must be given. ``reward``: ``raw`` as it was earned, or
    ``shaped`` by the operators before.
    """

    low: float | None = Field(None, allow_inf_nan=False)
    high: float | None = Field(None, allow_inf_nan=False)
    reward: Literal["raw", "shaped"] = "raw"

    @model_validator(mode="after")
    def _bounded(self) -> "RewardRangeConfiguration":
        if self.low is None and self.high is None:
            raise ValueError("give low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low is {self.low:g}, more than high {self.high:g}")
        return self


class RewardRange:
    """Drops groups whose mean reward is below ``low`` or above ``high``: ``reward_too_low``, ``reward_too_high``."""

    kind: ClassVar[Kind] = "filter"
    Configuration: ClassVar[type[OperatorConfiguration]] = RewardRangeConfiguration

    def __init__(self, configuration: RewardRangeConfiguration) -> None:
        self._given = configuration

    def open(self, context: OperatorContext) -> None:
        """Nothing: there is no state."""

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """Emit the group when its mean lies within the bounds, else drop it."""
        given = self._given
        rewards = [m.raw_reward if given.reward == "raw" else m.shaped_reward for m in record.counted()]
        mean, _ = mean_and_deviation(rewards)
        told = f"mean {given.reward} reward of {len(rewards)} members is {mean:g}"
        if not rewards or not all(map(isfinite, rewards)):
            context.drop("reward_unknown", f"{given.reward} rewards of {len(rewards)} members are {_listed(rewards)}")
        elif given.low is not None and mean < given.low:
            context.drop("reward_too_low", f"{told}, below {given.low:g}")
        elif given.high is not None and mean > given.high:
            context.drop("reward_too_high", f"{told}, above {given.high:g}")
        else:
            context.emit(record)

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """Nothing: there are no timers."""

    def close(self) -> None:
        """Nothing is held."""


def _listed(rewards: Sequence[float]) -> str:
    return ", ".join(f"{reward:g}" for reward in rewards) or "none"
