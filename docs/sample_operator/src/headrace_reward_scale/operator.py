"""Divide shaped rewards by the running standard deviation of all rewards so far.

``r / max(sigma, floor)``, where sigma is the unbiased standard deviation of the raw rewards of every group that passed,
this one included, by Welford's recurrence (Welford 1962). Rewards of several scales then weigh alike, as in the reward
scaling of PPO implementations (Engstrom et al. 2020, arXiv 2005.12729).
The state is one entry of 24 bytes in each task.
"""

import struct
from dataclasses import replace
from math import sqrt
from typing import ClassVar

from pydantic import Field

from headrace.pipeline.operators.operator import GroupDraft, Kind, OperatorConfiguration, OperatorContext

__all__ = ("RewardScale", "RewardScaleConfiguration")

_KEY = b"running"
_FORMAT = "<qdd"


class RewardScaleConfiguration(OperatorConfiguration):
    """``floor``: smallest deviation that is divided by. ``after``: rewards that are seen before the first is scaled."""

    floor: float = Field(1e-3, gt=0)
    after: int = Field(16, ge=2)


class RewardScale:
    """Divides shaped rewards by the running standard deviation of rewards."""

    kind: ClassVar[Kind] = "shape"
    Configuration: ClassVar[type[OperatorConfiguration]] = RewardScaleConfiguration

    def __init__(self, configuration: RewardScaleConfiguration) -> None:
        self._given = configuration
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def open(self, context: OperatorContext) -> None:
        """Go on from what the store remembers."""
        saved = context.store().get(_KEY)
        self._count, self._mean, self._squares = struct.unpack(_FORMAT, saved) if saved else (0, 0.0, 0.0)

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """Take the group's raw rewards in, then scale its shaped ones."""
        for member in record.counted():
            self._count += 1
            step = member.raw_reward - self._mean
            self._mean += step / self._count
            self._squares += step * (member.raw_reward - self._mean)
        context.store().put(_KEY, struct.pack(_FORMAT, self._count, self._mean, self._squares))
        if self._count < self._given.after:
            context.emit(record)
            return
        deviation = sqrt(self._squares / (self._count - 1))
        context.metrics.gauge("reward_deviation", deviation)
        scale = max(deviation, self._given.floor)
        context.emit(record.with_members([replace(m, shaped_reward=m.shaped_reward / scale) for m in record.members]))

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """Nothing: there are no timers."""

    def close(self) -> None:
        """Nothing is held."""
