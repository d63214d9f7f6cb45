"""Committed offsets of consumer groups, and those that wait inside open transactions.

A journal makes every commit durable before it is answered; it is rewritten when most of it is history. Offsets inside
a transaction are kept here as pending until the transaction coordinator commits or drops them, and make a reader who
asks for stable offsets wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headrace.connectors.broker.journal import Fact, Journal
from headrace.connectors.broker.storage import Storage

Position = tuple[str, int]
"""(topic, partition)"""


class Committed(NamedTuple):
    """An offset with what the client attached to it; `leader_epoch` is -1 when not given."""

    offset: int
    leader_epoch: int
    metadata: str


class OffsetStore:
    """Offsets of all groups; every change is in the journal when the call returns (else `StorageError`)."""

    def __init__(self, storage: Storage, name: str = "offsets.jsonl") -> None:
        self._groups: dict[str, dict[Position, Committed]] = {}
        self._pending: dict[tuple[str, Position], set[int]] = {}
        self._journal = Journal(storage, name, self._snapshot)
        for fact in self._journal.replay():
            self._apply(fact)

    def _snapshot(self) -> Iterable[Fact]:
        for group, entries in self._groups.items():
            yield ["commit", group, [[*position, *entry] for position, entry in entries.items()]]

    def _apply(self, fact: Fact) -> None:
        kind, group, rows = fact
        if kind == "commit":
            entries = self._groups.setdefault(group, {})
            for topic, partition, offset, epoch, metadata in rows:
                entries[topic, partition] = Committed(offset, epoch, metadata)
        else:
            remaining = self._groups.get(group, {})
            for topic, partition in rows if kind == "forget" else list(remaining):
                remaining.pop((topic, partition), None)
            if not remaining:
                self._groups.pop(group, None)

    def _record(self, fact: Fact) -> None:
        self._journal.write(fact)
        self._apply(fact)

    def commit(self, group: str, entries: Mapping[Position, Committed]) -> None:
        """Store offsets of a group."""
        self._record(["commit", group, [[*position, *entry] for position, entry in entries.items()]])

    def forget(self, group: str, positions: Iterable[Position]) -> None:
        """Remove some offsets of a group."""
        self._record(["forget", group, [list(position) for position in positions]])

    def forget_group(self, group: str) -> None:
        """Remove all offsets of a group."""
        self._record(["forget-group", group, []])

    def forget_topic(self, topic: str) -> None:
        """Remove the offsets of a deleted topic from every group, as Kafka does."""
        for group, entries in list(self._groups.items()):
            gone = [position for position in entries if position[0] == topic]
            if gone:
                self.forget(group, gone)

    def groups(self) -> list[str]:
        """Groups that have offsets."""
        return list(self._groups)

    def of(self, group: str) -> Mapping[Position, Committed]:
        """All committed offsets of a group."""
        return self._groups.get(group, {})

    def hold(self, group: str, positions: Iterable[Position], producer_id: int) -> None:
        """Mark offsets as pending in the transaction of a producer."""
        for position in positions:
            self._pending.setdefault((group, position), set()).add(producer_id)

    def release(self, group: str, positions: Iterable[Position], producer_id: int) -> None:
        """Undo `hold` when the transaction has ended."""
        for position in positions:
            holders = self._pending.get((group, position))
            if holders is not None:
                holders.discard(producer_id)
                if not holders:
                    del self._pending[group, position]

    def is_pending(self, group: str, position: Position) -> bool:
        """Whether an open transaction has an offset for this position."""
        return (group, position) in self._pending

    def compact_journal(self) -> None:
        """Rewrite the journal when it has grown out of proportion."""
        self._journal.rewrite_if_grown()
