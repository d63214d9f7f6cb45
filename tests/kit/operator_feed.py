"""Drafts for tests of operators, and a context that keeps what became of them."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any, cast

from stage_feed import make_members

from headrace.pipeline.operators.operator import GroupDraft, Operator
from headrace.pipeline.runtime.driver import Counts
from headrace.pipeline.runtime.store import MemoryStore, StoreView
from headrace.schemas.records import Group, Member


def make_draft(rewards: Many[float], *, group: int = 0, **columns: Many[Any]) -> GroupDraft:
    """A complete group with these rewards; ``columns`` are other fields of its members, one value a member."""
    lengths = columns.get("length", [2] * len(rewards))
    *records, closed = make_members(group, tokens=lengths)
    members = [
        replace(
            cast(Member, record), raw_reward=reward, shaped_reward=reward,
            **{name: values[number] for name, values in columns.items()},
        )
        for number, (record, reward) in enumerate(zip(records, rewards, strict=True))
    ]  # fmt: skip
    return GroupDraft(group=cast(Group, closed), members=(), group_size=len(rewards)).with_members(members)


class OperatorFeed:
    """An operator's context over a store in memory: ``decide`` gives the emitted draft or (reason, detail)."""

    def __init__(self) -> None:
        self.metrics = Counts()
        self.memory = MemoryStore()
        self.ended: list[Any] = []

    def now(self) -> int:
        return 0

    def store(self) -> StoreView:
        return StoreView(self.memory, b"s")

    def schedule(self, key: str, at_ms: int) -> None:
        raise AssertionError("no operator here has timers")

    def emit(self, draft: GroupDraft) -> None:
        self.ended.append(draft)

    def drop(self, reason: str, detail: str) -> None:
        self.ended.append((reason, detail))

    def decide(self, operator: Operator, draft: GroupDraft) -> Any:
        operator.process(draft, self)
        (ended,) = self.ended
        self.ended.clear()
        return ended

    def masked(self) -> dict[str, int]:
        """Masked members by reason."""
        return {dict(labels)["reason"]: n for (name, labels), n in self.metrics.counters.items() if "masked" in name}


def statuses(draft: GroupDraft) -> str:
    """First letters of the members' statuses: t, b or e."""
    return "".join(m.status[0] for m in draft.members)
