"""Train a subset of a group's rollouts whose rewards vary most (max-variance down-sampling of PODS).

Of n members to train ``keep`` are chosen such that the variance of their shaped rewards is the largest of all subsets
of that size. Such a subset is always the h highest and the ``keep`` - h lowest rewards for some h (Xu et al. 2025,
arXiv 2504.13818), so ``keep`` + 1 candidates are compared, exactly, in fractions.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from typing import ClassVar, Literal

from pydantic import Field

from headrace.pipeline.operators.operator import GroupDraft, Kind, OperatorConfiguration, OperatorContext
from headrace.schemas.records import Member

__all__ = ("Downsample", "DownsampleConfiguration", "most_varied")


class DownsampleConfiguration(OperatorConfiguration):
    """``keep``: members that are trained. ``rest``: the others stay in the statistics (``baseline_only``), or these are
    taken anew without them (``renormalise``). Members that others took out stay as they are.
    """

    keep: int = Field(ge=2)
    rest: Literal["baseline_only", "renormalise"] = "baseline_only"


def most_varied(rewards: Sequence[float], keep: int) -> list[int]:
    """Positions, in order, of ``keep`` rewards with the largest variance; all of them when there are no more.

    Ties go to the most even split between high and low, then to fewer high ones; equal rewards in order of position.
    Rewards must be finite.

    >>> most_varied([0.0, 1.0, 1.0, 0.0, 1.0, 1.0], 4)
    [0, 3, 4, 5]
    >>> most_varied([0.1, 0.9, 0.5, 0.4], 2)
    [0, 1]
    """
    if keep >= len(rewards):
        return list(range(len(rewards)))
    order = sorted(range(len(rewards)), key=lambda i: (rewards[i], i))
    values = [Fraction(rewards[i]) for i in order]
    sums = [Fraction(0), *accumulate(values)]
    squares = [Fraction(0), *accumulate(v * v for v in values)]

    def worth(high: int) -> tuple[Fraction, int, int]:
        low, last = keep - high, len(values) - high
        total = sums[low] + sums[-1] - sums[last]
        return keep * (squares[low] + squares[-1] - squares[last]) - total * total, -abs(2 * high - keep), -high

    high = max(range(keep + 1), key=worth)
    return sorted(order[: keep - high] + order[len(order) - high :])


class Downsample:
    """Trains the ``keep`` members whose rewards vary most; groups with no more members pass as they are."""

    kind: ClassVar[Kind] = "downsample"
    Configuration: ClassVar[type[OperatorConfiguration]] = DownsampleConfiguration

    def __init__(self, configuration: DownsampleConfiguration) -> None:
        self._given = configuration

    def open(self, context: OperatorContext) -> None:
        """Nothing: there is no state."""

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """Emit the group with the chosen members as the only ones to train."""
        trained = record.trained()
        if len(trained) <= self._given.keep:
            context.emit(record)
            return
        chosen = {trained[i].replica for i in most_varied([m.shaped_reward for m in trained], self._given.keep)}
        context.metrics.count(
            "members_masked", len(trained) - len(chosen), operator="downsample", reason="less_varied"
        )  # fmt: skip
        members = [m if m.replica in chosen else self._left_out(m) for m in record.members]
        draft = record.with_members(members)
        if self._given.rest == "renormalise":  # the group was complete and earned what it earned before the choice
            kept = record.group
            group = replace(draft.group, short=kept.short, raw_mean=kept.raw_mean, raw_std=kept.raw_std)
            draft = replace(draft, group=group)
        context.emit(draft)

    def _left_out(self, member: Member) -> Member:
        if member.status != "train":
            return member
        if self._given.rest == "baseline_only":
            return replace(member, status="baseline_only")
        return replace(member, status="excluded")

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """Nothing: there are no timers."""

    def close(self) -> None:
        """Nothing is held."""
