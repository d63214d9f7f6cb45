"""Consumer groups in virtual time."""

from __future__ import annotations

import pytest

from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.group_journal import GroupJournal
from headrace.connectors.broker.groups import GroupCoordinator, JoinRequest, JoinResult, Phase, SyncResult
from headrace.connectors.broker.storage import MemoryStorage


class Client:
    """One consumer talking to a coordinator."""

    def __init__(self, groups: GroupCoordinator, instance: str | None = None) -> None:
        self.groups = groups
        self.instance = instance
        self.member_id = ""
        self.joined: list[JoinResult] = []
        self.synced: list[SyncResult] = []

    def join(self, now: float, subscription: bytes = b"s", protocols: tuple[str, ...] = ("range",)) -> None:
        """Send a join; a client that is told its id joins again with it, as real ones do."""
        request = JoinRequest(
            "g",
            self.member_id,
            self.instance,
            "client",
            "/host",
            6000,
            10_000,
            "consumer",
            [(name, subscription) for name in protocols],
            True,
        )
        self.groups.join(request, lambda result: self._answered(result, now, subscription, protocols), now)

    def _answered(self, result: JoinResult, now: float, subscription: bytes, protocols: tuple[str, ...]) -> None:
        if result.code is Code.MEMBER_ID_REQUIRED:
            self.member_id = result.member_id
            self.join(now, subscription, protocols)
            return
        self.joined.append(result)
        if result.code is Code.NONE:
            self.member_id = result.member_id

    @property
    def generation(self) -> int:
        """Generation of the last successful join."""
        return self.joined[-1].generation

    def sync(self, now: float) -> None:
        """Send a sync; the leader assigns every member its own id as bytes."""
        last = self.joined[-1]
        given = {m.member_id: m.member_id.encode() for m in last.members} if last.leader == self.member_id else {}
        self.groups.sync("g", last.generation, self.member_id, self.instance, given, self.synced.append, now)

    def heartbeat(self, now: float) -> Code:
        """Send a heartbeat."""
        return self.groups.heartbeat("g", self.generation, self.member_id, self.instance, now)


def _settle(groups: GroupCoordinator, clients: list[Client], now: float) -> None:
    groups.tick(now)
    for client in clients:
        client.sync(now)


def _stable(count: int, instances: bool = False) -> tuple[GroupCoordinator, list[Client]]:
    groups = GroupCoordinator(first_delay=0.1)
    clients = [Client(groups, f"i{n}" if instances else None) for n in range(count)]
    for client in clients:
        client.join(0.0)
    _settle(groups, clients, 0.2)
    assert all(client.synced[-1] == SyncResult(Code.NONE, client.member_id.encode()) for client in clients)
    return groups, clients


def test_members_that_start_together_get_one_generation() -> None:
    groups, clients = _stable(3)
    group = groups.get("g")
    assert group is not None and (group.generation, group.phase) == (1, Phase.STABLE)
    leaders = [client for client in clients if client.joined[-1].members]
    assert len(leaders) == 1 and len(leaders[0].joined[-1].members) == 3


def test_a_newcomer_rebalances_and_old_members_are_told_by_heartbeat() -> None:
    groups, clients = _stable(2)
    newcomer = Client(groups)
    newcomer.join(1.0)
    assert newcomer.joined == []
    assert [client.heartbeat(1.1) for client in clients] == [Code.REBALANCE_IN_PROGRESS] * 2
    for client in clients:
        client.join(1.2)
    _settle(groups, [*clients, newcomer], 1.3)
    assert newcomer.generation == clients[0].generation == 2
    assert newcomer.heartbeat(1.4) is Code.NONE


def test_a_silent_member_is_evicted_and_its_commits_are_refused() -> None:
    groups, (silent, alive) = _stable(2)
    assert alive.heartbeat(5.0) is Code.NONE
    groups.tick(6.3)
    assert alive.heartbeat(6.4) is Code.REBALANCE_IN_PROGRESS
    alive.join(6.4)
    _settle(groups, [alive], 6.5)
    with pytest.raises(BrokerError) as caught:
        groups.check_commit("g", silent.generation, silent.member_id, None, False, 6.6)
    assert caught.value.code is Code.UNKNOWN_MEMBER_ID
    with pytest.raises(BrokerError) as caught:
        groups.check_commit("g", 1, alive.member_id, None, True, 6.6)
    assert caught.value.code is Code.ILLEGAL_GENERATION
    groups.check_commit("g", 2, alive.member_id, None, True, 6.6)


def test_a_member_that_does_not_rejoin_is_dropped_after_the_rebalance_timeout() -> None:
    groups, (leaver, stayer) = _stable(2)
    newcomer = Client(groups)
    newcomer.join(1.0)
    stayer.join(1.1)
    for now in range(2, 11):
        groups.heartbeat("g", 1, leaver.member_id, None, float(now))
        groups.tick(float(now))
    assert newcomer.joined == []
    groups.tick(11.1)
    assert newcomer.joined[-1].generation == 2
    assert leaver.heartbeat(11.2) is Code.UNKNOWN_MEMBER_ID


def test_a_leader_that_never_assigns_is_dropped() -> None:
    groups = GroupCoordinator(first_delay=0.1)
    clients = [Client(groups) for _ in range(2)]
    for client in clients:
        client.join(0.0)
    groups.tick(0.1)
    leader = next(client for client in clients if client.joined[-1].members)
    follower = next(client for client in clients if client is not leader)
    follower.sync(0.2)
    groups.tick(10.5)
    assert follower.synced[-1].code is Code.REBALANCE_IN_PROGRESS
    follower.join(10.6)
    assert follower.joined[-1].leader == follower.member_id


def test_a_static_member_comes_back_without_a_rebalance() -> None:
    groups, clients = _stable(2, instances=True)
    for old in clients:
        restarted = Client(groups, old.instance)
        restarted.join(1.0)
        assert restarted.generation == 1 and not restarted.joined[-1].members
        assert restarted.joined[-1].leader != restarted.member_id
        restarted.sync(1.1)
        assert restarted.synced[-1] == SyncResult(Code.NONE, old.member_id.encode())
        assert old.heartbeat(1.2) is Code.FENCED_INSTANCE_ID
        with pytest.raises(BrokerError) as caught:
            groups.check_commit("g", 1, old.member_id, old.instance, True, 1.2)
        assert caught.value.code is Code.FENCED_INSTANCE_ID


def test_a_static_member_that_is_gone_too_long_loses_its_place() -> None:
    groups, (gone, alive) = _stable(2, instances=True)
    assert alive.heartbeat(5.0) is Code.NONE
    groups.tick(6.3)
    assert alive.heartbeat(6.4) is Code.REBALANCE_IN_PROGRESS
    assert gone.heartbeat(6.4) is Code.UNKNOWN_MEMBER_ID


def test_leaving_by_member_and_by_instance() -> None:
    groups, clients = _stable(3, instances=True)
    assert groups.leave("g", clients[0].member_id, None, 1.0) is Code.NONE
    assert groups.leave("g", "", "i1", 1.0) is Code.NONE
    assert groups.leave("g", "nobody", None, 1.0) is Code.UNKNOWN_MEMBER_ID
    assert clients[2].heartbeat(1.1) is Code.REBALANCE_IN_PROGRESS
    assert groups.leave("g", clients[2].member_id, "i2", 1.2) is Code.NONE
    group = groups.get("g")
    assert group is not None and group.phase == Phase.EMPTY
    assert groups.delete("g") and not groups.delete("g")


def test_an_id_that_was_handed_out_and_never_used_does_not_hold_a_rebalance_for_ever() -> None:
    groups, (member,) = _stable(1)
    ids: list[JoinResult] = []
    request = JoinRequest("g", "", None, "c", "/h", 6000, 10_000, "consumer", [("range", b"")], True)
    groups.join(request, ids.append, 1.0)
    assert ids[0].code is Code.MEMBER_ID_REQUIRED
    member.join(1.1)
    assert member.joined[-1].generation == 1
    assert member.heartbeat(6.0) is Code.REBALANCE_IN_PROGRESS
    groups.tick(7.1)
    assert member.joined[-1].generation == 2


def test_outsiders_commit_only_while_nobody_is_in_the_group() -> None:
    groups, (member,) = _stable(1)
    with pytest.raises(BrokerError) as caught:
        groups.check_commit("g", -1, "", None, False, 1.0)
    assert caught.value.code is Code.UNKNOWN_MEMBER_ID
    groups.check_commit("g", -1, "", None, True, 1.0)
    groups.leave("g", member.member_id, None, 1.0)
    groups.check_commit("g", -1, "", None, False, 1.0)
    groups.check_commit("unheard-of", -1, "", None, False, 1.0)
    with pytest.raises(BrokerError):
        groups.check_commit("unheard-of", 3, "m", None, False, 1.0)


def test_members_without_a_common_protocol_are_refused() -> None:
    groups, _ = _stable(1)
    stranger = Client(groups)
    stranger.join(1.0, protocols=("roundrobin",))
    assert stranger.joined[-1].code is Code.INCONSISTENT_GROUP_PROTOCOL


def test_members_go_on_after_a_restart_of_the_broker(memory: MemoryStorage) -> None:
    journal = GroupJournal(memory, 0.0)
    groups = GroupCoordinator(0.1, journal.groups, journal)
    clients = [Client(groups, instance) for instance in (None, "static")]
    for client in clients:
        client.join(0.0, subscription=bytes(range(256)))
    _settle(groups, clients, 0.2)
    again = GroupJournal(memory, 100.0)
    restarted = GroupCoordinator(0.1, again.groups, again)
    for client in clients:
        client.groups = restarted
        assert client.heartbeat(105.0) is Code.NONE
        client.sync(105.0)
        assert client.synced[-1] == SyncResult(Code.NONE, client.member_id.encode())
    restarted.check_commit("g", 1, clients[0].member_id, None, True, 105.0)
    assert clients[1].heartbeat(110.9) is Code.NONE
    restarted.tick(111.2)
    assert clients[1].heartbeat(111.3) is Code.REBALANCE_IN_PROGRESS
    assert clients[0].heartbeat(111.3) is Code.UNKNOWN_MEMBER_ID


def test_a_generation_without_assignment_is_finished_after_a_restart(memory: MemoryStorage) -> None:
    journal = GroupJournal(memory, 0.0)
    groups = GroupCoordinator(0.1, journal.groups, journal)
    old, new = Client(groups), Client(groups)
    old.join(0.0)
    _settle(groups, [old], 0.2)
    new.join(1.0)
    old.join(1.1)
    assert (old.generation, new.generation) == (2, 2)
    again = GroupJournal(memory, 2.0)
    restarted = GroupCoordinator(0.1, again.groups, again)
    old.groups = new.groups = restarted
    assert [client.heartbeat(2.1) for client in (old, new)] == [Code.NONE] * 2
    _settle(restarted, [new, old], 2.4)
    assert [client.synced[-1].code for client in (old, new)] == [Code.NONE] * 2


def test_deleted_groups_stay_deleted_and_the_journal_is_folded(memory: MemoryStorage) -> None:
    journal = GroupJournal(memory, 0.0)
    groups = GroupCoordinator(0.0, journal.groups, journal)
    for turn in range(600):
        client = Client(groups)
        client.join(float(turn))
        client.sync(float(turn))
        groups.leave("g", client.member_id, None, float(turn))
    journal.compact()
    assert len(memory.files["groups.jsonl"].data) < 100
    assert GroupJournal(memory, 0.0).groups["g"].generation == groups.get("g").generation  # type: ignore[union-attr]
    groups.delete("g")
    assert GroupJournal(memory, 0.0).groups == {}
