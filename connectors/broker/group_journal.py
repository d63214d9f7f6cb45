"""Membership of consumer groups across restarts of the broker: every generation goes into a journal.

A member whose broker was killed goes on with its assignment after the restart, as with Apache Kafka, instead of being
expelled. Membership is soft: when the disk refuses a line, the group goes on in memory and a restart forgets it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.connectors.broker.groups import Group, Member, Phase
from headrace.connectors.broker.journal import Fact, Journal
from headrace.connectors.broker.storage import Storage, StorageError


class GroupJournal:
    """Writes groups as they settle; `groups` are those found at start, each member seen `now` (monotonic seconds)."""

    def __init__(self, storage: Storage, now: float) -> None:
        self.groups: dict[str, Group] = {}
        self._journal = Journal(storage, "groups.jsonl", self._snapshot, minimum=1_000)
        for fact in self._journal.replay():
            self.groups.pop(fact[0], None)
            if len(fact) > 1:
                self.groups[fact[0]] = _restored(fact, now)

    def _snapshot(self) -> Iterable[Fact]:
        return [_fact(group) for group in self.groups.values()]

    def settled(self, group: Group) -> None:
        """A group has a new generation, an assignment, or no members any more."""
        self._write(_fact(group))

    def gone(self, group: Group) -> None:
        """A group was deleted."""
        self._write([group.name])

    def _write(self, fact: Fact) -> None:
        try:
            self._journal.write(fact)
        except StorageError:
            return

    def compact(self) -> None:
        """Rewrite the journal when it has grown out of proportion and no group is between two generations."""
        if all(group.phase != Phase.PREPARING for group in self.groups.values()):
            self._journal.rewrite_if_grown()


def _text(data: bytes) -> str:
    return data.decode("latin-1")


def _fact(group: Group) -> Fact:
    return [
        group.name,
        group.phase,
        group.generation,
        group.protocol_type,
        group.protocol,
        group.leader,
        [
            [
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.session,
                member.rebalance,
                [[name, _text(metadata)] for name, metadata in member.protocols],
                _text(member.assignment),
            ]
            for member in group.members.values()
        ],
    ]


def _restored(fact: Fact, now: float) -> Group:
    name, phase, generation, protocol_type, protocol, leader, members = fact
    group = Group(name, phase, generation, protocol_type, protocol, leader)
    for row in members:
        member = _member(row, now)
        group.members[member.member_id] = member
        if member.instance_id is not None:
            group.instances[member.instance_id] = member.member_id
    group.deadline = now + max((member.rebalance for member in group.members.values()), default=0.0)
    return group


def _member(row: list[Any], now: float) -> Member:
    member_id, instance_id, client_id, client_host, session, rebalance, protocols, assignment = row
    offered = [(name, metadata.encode("latin-1")) for name, metadata in protocols]
    return Member(
        member_id,
        instance_id,
        client_id,
        client_host,
        session,
        rebalance,
        offered,
        now,
        assignment=assignment.encode("latin-1"),
    )
