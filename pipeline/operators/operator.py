"""What an operator is: one data algorithm over closed groups, between rollout and batch.

In: the draft of a closed group of one policy. Out: the draft, changed or not, or a named drop. Operators are pure: they
know records, their own state and their Context, nothing of Kafka or of each other, and they never sleep.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from sys import float_info
from typing import ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from headrace.pipeline.runtime.stage import Metrics, Store
from headrace.schemas.parts import RoleStatistics
from headrace.schemas.records import Group, Member
from headrace.schemas.role_rewards import role_rewards

__all__ = ("GroupDraft", "Kind", "Operator", "OperatorConfiguration", "OperatorContext", "mean_and_deviation")

_SQUARED = 1e150
"""Squares of larger numbers, and sums of them, are not sure to be floats."""

Kind = Literal["shape", "filter", "downsample"]
"""``shape`` changes shaped rewards, ``filter`` drops groups, ``downsample`` makes members baseline_only.

They must stand in this order: statistics are taken after shaping and before filtering (protocol 6).
"""


class OperatorConfiguration(BaseModel):
    """Base of an operator's configuration: the keys of its ``[[operators]]`` entry without ``type``.

    Numbers are finite: TOML knows ``nan`` and ``inf``, which no threshold compares with as one means it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDraft:
    """A closed group before it is written: its Group record (statistics included) and its Members by replica."""

    group: Group
    members: tuple[Member, ...]
    group_size: int
    """Members that were asked for."""

    def counted(self) -> list[Member]:
        """Members that count in the statistics: train and baseline_only."""
        return [m for m in self.members if m.status != "excluded"]

    def trained(self) -> list[Member]:
        """Members with status train."""
        return [m for m in self.members if m.status == "train"]

    def by_role(self) -> dict[str, list[float]]:
        """Shaped rewards of counted members by role, where the policy is rewarded in several; else empty."""
        values: dict[str, list[float]] = {}
        for m in self.counted():
            for role, value in role_rewards(m.rewards, raw=m.raw_reward, shaped=m.shaped_reward).items():
                values.setdefault(role, []).append(value)
        return values if len(values) > 1 else {}

    def with_members(self, members: Sequence[Member]) -> "GroupDraft":
        """The draft with other members and the statistics that follow from them."""
        draft = replace(self, members=tuple(members))
        counted, trained = draft.counted(), draft.trained()
        reward_mean, reward_std = mean_and_deviation([m.shaped_reward for m in counted])
        raw_mean, raw_std = mean_and_deviation([m.raw_reward for m in counted])
        group = replace(
            self.group, members=len(draft.members), counted=len(counted), trained=len(trained),
            short=len(counted) < self.group_size, reward_mean=reward_mean, reward_std=reward_std, raw_mean=raw_mean,
            raw_std=raw_std, oldest_version=min((m.oldest_version for m in trained), default=-1),
            newest_version=max((m.newest_version for m in trained), default=-1), tokens=sum(m.length for m in trained),
            roles=[_statistics(role, values) for role, values in draft.by_role().items()],
        )  # fmt: skip
        return replace(draft, group=group)


def _statistics(role: str, values: Sequence[float]) -> RoleStatistics:
    mean, std = mean_and_deviation(values)
    return RoleStatistics(role=role, mean=mean, std=std, count=len(values))


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased standard deviation; exactly 0 when all values are equal or there is at most one.

    Finite for finite values, however large: a deviation beyond the largest float is that float.

    >>> mean_and_deviation([1.0, 0.0, 0.0, 1.0])
    (0.5, 0.5773502691896257)
    >>> mean_and_deviation([0.1, 0.1, 0.1])
    (0.1, 0.0)
    """
    if not values:
        return 0.0, 0.0
    if min(values) == max(values):
        return float(values[0]), 0.0
    largest = max(map(abs, values))
    if _SQUARED < largest < inf:
        mean, deviation = mean_and_deviation([v / largest for v in values])
        return mean * largest, min(deviation * largest, float_info.max)
    mean = sum(values) / len(values)
    return mean, sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


class OperatorContext(Protocol):
    """What an operator may use while it handles one group; exactly one of ``emit`` and ``drop`` ends the group."""

    metrics: Metrics

    def now(self) -> int:
        """Milliseconds since the epoch, constant within one call."""
        ...

    def store(self) -> Store:
        """The operator's own state in this task."""
        ...

    def schedule(self, key: str, at_ms: int) -> None:
        """Arm the operator's persisted timer ``key``."""
        ...

    def emit(self, draft: GroupDraft) -> None:
        """Pass the group on."""
        ...

    def drop(self, reason: str, detail: str) -> None:
        """End the group as filtered, by a named reason, with the numbers that decided it in words."""
        ...


class Operator(Protocol):
    """One data algorithm. Made with its ``Configuration``; entry point group ``headrace.operators``."""

    kind: ClassVar[Kind]
    Configuration: ClassVar[type[OperatorConfiguration]]

    def open(self, context: OperatorContext) -> None:
        """Build the view from the store; called once before anything else."""
        ...

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """Decide on one closed group: ``context.emit`` it (changed or not) or ``context.drop`` it."""
        ...

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """The timer is due; groups cannot be emitted from here."""
        ...

    def close(self) -> None:
        """Let go of what ``open`` took: the task is over or moves on, or its last transaction was undone and another
        object goes on. Not called when the process is killed.
        """
        ...
