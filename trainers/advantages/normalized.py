"""Rewards less a mean, divided by a deviation, each of the whole batch, of the group, or left out.

The figures of a batch are made of those of its groups, so they too are over every member that counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from headrace.trainers.advantages.advantage import AddUp, AdvantageOptions, Scored
from headrace.trainers.advantages.per_member import PerMember

__all__ = ("BatchNormalized", "MixedNormalized", "NormalizedOptions")

Over = Literal["none", "batch", "group"]


class NormalizedOptions(AdvantageOptions):
    """mean, std: over what. leave_one_out: the mean is that of the others. unbiased: divide squares by n - 1.

    spread: the deviation is that of the rewards, or of the residuals that the mean leaves, about 0. epsilon: added to
    the deviation.
    """

    mean: Over = "batch"
    std: Over = "batch"
    leave_one_out: bool = False
    unbiased: bool = True
    spread: Literal["rewards", "residuals"] = "rewards"
    epsilon: float = Field(1e-6, ge=0)


class MixedOptions(NormalizedOptions):
    """The mean of the group, the deviation of the batch."""

    mean: Over = "group"


@dataclass(frozen=True, slots=True)
class _Moments:
    """Count, mean, and the sum of squares about the mean, of a group or a batch."""

    count: float
    mean: float
    squares: float

    def about(self, centre: float) -> float:
        """The sum of squares about ``centre``."""
        return self.squares + self.count * (self.mean - centre) ** 2


class BatchNormalized(PerMember):
    """``(R - mean) / (std + epsilon)``; 0 where the deviation is 0."""

    Options: ClassVar[type[AdvantageOptions]] = NormalizedOptions

    def __init__(self, options: NormalizedOptions) -> None:
        self.options = options

    def values_of(self, members: Sequence[Scored], add_up: AddUp) -> list[float]:
        """See ``PerMember``."""
        groups = {m.group: _Moments(m.count, m.mean, max(0, m.count - 1) * m.std**2) for m in members}
        total = add_up(
            {"n": sum(g.count for g in groups.values()), "r": sum(g.count * g.mean for g in groups.values())}
        )
        centre = total.get("r", 0.0) / max(1.0, total.get("n", 0.0))
        apart = add_up({"s": sum(g.about(centre) for g in groups.values())})
        batch = _Moments(total.get("n", 0.0), centre, apart.get("s", 0.0))
        residuals = add_up({"s": sum(self._residuals(g, batch) for g in groups.values())}).get("s", 0.0)
        return [self._value(m, groups[m.group], batch, residuals) for m in members]

    def _value(self, member: Scored, group: _Moments, batch: _Moments, residuals: float) -> float:
        o = self.options
        if group.count <= 1 and "group" in (o.mean, o.std):
            return member.reward if o.singleton == "raw" else 0.0
        left = (member.reward - self._centre(group, batch)) * self._scale(group, batch)
        if o.std == "none":
            return left
        over = group if o.std == "group" else batch
        squares = over.squares
        if o.spread == "residuals":
            squares = self._residuals(group, batch) if o.std == "group" else residuals
        deviation = math.sqrt(squares / max(1.0, over.count - o.unbiased))
        return left / (deviation + o.epsilon) if deviation > 0 else 0.0

    def _centre(self, group: _Moments, batch: _Moments) -> float:
        return {"none": 0.0, "batch": batch.mean, "group": group.mean}[self.options.mean]

    def _scale(self, group: _Moments, batch: _Moments) -> float:
        """Turns the distance to the mean into the distance to the mean of the others."""
        if not self.options.leave_one_out or self.options.mean == "none":
            return 1.0
        n = group.count if self.options.mean == "group" else batch.count
        return n / max(1.0, n - 1)

    def _residuals(self, group: _Moments, batch: _Moments) -> float:
        """The sum of the squares that the mean leaves in a group."""
        return group.about(self._centre(group, batch)) * self._scale(group, batch) ** 2


class MixedNormalized(BatchNormalized):
    """``BatchNormalized`` with the mean of the group and the deviation of the batch."""

    Options: ClassVar[type[AdvantageOptions]] = MixedOptions
