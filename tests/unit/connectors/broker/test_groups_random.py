"""Groups under random schedules: members come, go, fall silent and return; what must hold holds at every moment."""

from __future__ import annotations

import random

import pytest

from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.group_journal import GroupJournal
from headrace.connectors.broker.groups import Group, GroupCoordinator, JoinRequest, JoinResult, Phase, SyncResult
from headrace.connectors.broker.storage import MemoryStorage

SESSION = 6.0


class Member:
    """A consumer as clients are: joins, syncs, heartbeats, and joins again when told to."""

    def __init__(self, play: Play, name: int, instance: str | None) -> None:
        self.play, self.name, self.instance = play, name, instance
        self.member_id, self.generation = "", -1
        self.waiting = ""
        self.assignment: bytes | None = None
        self.fenced = False
        self.leads: list[str] = []

    def join(self) -> None:
        """Send a join, unless an answer is owed."""
        if self.waiting:
            return
        self.waiting, self.assignment = "join", None
        request = JoinRequest(
            "g", self.member_id, self.instance, f"c{self.name}", "/h", int(SESSION * 1000), 9_000, "consumer",
            [("range", b"%d" % self.name)], True,
        )  # fmt: skip
        self.play.groups.join(request, self.joined, self.play.now)

    def joined(self, result: JoinResult) -> None:
        """The answer to a join: exactly one for each."""
        assert self.waiting == "join", "one answer"
        self.waiting = ""
        if result.code is Code.MEMBER_ID_REQUIRED:
            self.member_id = result.member_id
            self.join()
        elif result.code is Code.NONE:
            assert result.generation >= self.generation, "generations grow"
            self.member_id, self.generation = result.member_id, result.generation
            self.leads = [m.member_id for m in result.members]
            assert not self.leads or self.member_id in self.leads
        else:
            self.refused(result.code)

    def refused(self, code: Code) -> None:
        """What a client does with each code."""
        assert code in (
            Code.UNKNOWN_MEMBER_ID, Code.FENCED_INSTANCE_ID, Code.REBALANCE_IN_PROGRESS, Code.ILLEGAL_GENERATION,
        )  # fmt: skip
        self.assignment = None
        if code is Code.FENCED_INSTANCE_ID:
            self.fenced = True
        if code is Code.UNKNOWN_MEMBER_ID:
            self.member_id, self.generation = "", -1

    def sync(self) -> None:
        """Ask for the assignment; the leader brings one for everybody it was told of."""
        if self.waiting or self.generation < 0 or self.assignment is not None:
            return
        self.waiting = "sync"
        given = {m: b"%d of %d" % (self.generation, len(self.leads)) for m in self.leads}
        self.play.groups.sync("g", self.generation, self.member_id, self.instance, given, self.synced, self.play.now)

    def synced(self, result: SyncResult) -> None:
        """The answer to a sync."""
        assert self.waiting == "sync", "one answer"
        self.waiting = ""
        if result.code is Code.NONE:
            self.assignment = result.assignment
        else:
            self.refused(result.code)

    def heartbeat(self) -> None:
        """A life sign; join again when told to."""
        if self.generation < 0 or self.waiting:
            return
        code = self.play.groups.heartbeat("g", self.generation, self.member_id, self.instance, self.play.now)
        if code is not Code.NONE:
            self.refused(code)
            if code is Code.REBALANCE_IN_PROGRESS:
                self.join()


class Play:
    """A coordinator, its clients and its invariants."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.memory = MemoryStorage()
        self.now = 0.0
        self.members: list[Member] = []
        self.count = 0
        self.start()

    def start(self) -> None:
        """Start the broker, again on the same journal."""
        journal = GroupJournal(self.memory, self.now)
        self.groups = GroupCoordinator(0.1, journal.groups, journal)
        for member in self.members:
            member.waiting = ""

    def newcomer(self) -> None:
        """A new member, every second one static; sometimes a new process of a static one that still runs."""
        self.count += 1
        instance = f"i{self.dice.randrange(3)}" if self.dice.random() < 0.5 else None
        member = Member(self, self.count, instance)
        self.members.append(member)
        member.join()

    def step(self) -> None:
        """One thing that happens."""
        self.now += self.dice.random() * 0.5
        roll = self.dice.random()
        if roll < 0.12 and len(self.members) < 5:
            self.newcomer()
        elif roll < 0.16 and self.members:
            gone = self.members.pop(self.dice.randrange(len(self.members)))
            if self.dice.random() < 0.5 and not gone.waiting:
                self.groups.leave("g", gone.member_id, gone.instance, self.now)
        elif roll < 0.17:
            self.start()
        elif roll < 0.6 and self.members:
            self.dice.choice(self.members).sync()
        elif self.members:
            self.dice.choice(self.members).heartbeat()
        self.groups.tick(self.now)
        self.members = [member for member in self.members if not member.fenced]
        self.check()

    def settle(self) -> None:
        """Everybody behaves for a while."""
        for _ in range(120):
            self.now += 0.25
            for member in self.members:
                if member.generation < 0:
                    member.join()
                member.sync()
                member.heartbeat()
            self.groups.tick(self.now)
            self.members = [member for member in self.members if not member.fenced]

    @property
    def group(self) -> Group | None:
        """The group."""
        return self.groups.get("g")

    def check(self) -> None:
        """What must hold at every moment."""
        group = self.group
        if group is None:
            return
        assert set(group.instances.values()) <= set(group.members)
        assert all(member.member_id == name for name, member in group.members.items())
        if group.phase in (Phase.STABLE, Phase.COMPLETING):
            assert group.members
            assert group.leader in group.members
            assert group.protocol == "range"
        if group.phase == Phase.EMPTY:
            assert not group.members
        current = [m for m in self.members if m.assignment is not None and m.generation == group.generation]
        assert len({m.assignment for m in current if m.assignment}) <= 1, "one leader assigned a generation"
        instances = [m.instance for m in current if m.instance and group.instances.get(m.instance) == m.member_id]
        assert len(set(instances)) == len(instances), "one process holds an instance"
        for member in self.members:
            if member.generation > group.generation:
                raise AssertionError("a member is ahead of its group")
            if 0 <= member.generation < group.generation and group.members:
                with pytest.raises(BrokerError):
                    self.groups.check_commit("g", member.generation, member.member_id, member.instance, False, self.now)


@pytest.mark.parametrize("seed", range(25))
def test_a_group_keeps_its_rules_and_comes_to_rest(seed: int) -> None:
    play = Play(seed)
    for _ in range(250):
        play.step()
    play.settle()
    group = play.group
    if not play.members or group is None:
        return
    assert group.phase == Phase.STABLE
    assert {member.member_id for member in play.members} == set(group.members)
    assert {member.generation for member in play.members} == {group.generation}
    assert {member.assignment for member in play.members} == {b"%d of %d" % (group.generation, len(group.members))}
    play.members.clear()
    play.now += SESSION + 1
    play.groups.tick(play.now)
    assert group.phase == Phase.EMPTY
    assert play.groups.delete("g")
