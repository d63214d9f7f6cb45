"""Offsets committed, fetched and deleted in every version: epochs, metadata, membership, open transactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from wire_client import WireClient, versions_of

from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.groups import JoinRequest, JoinResult
from headrace.connectors.broker.offsets import Committed
from headrace.connectors.broker.wire import Writer

Place = tuple[str, int]


def by_topic(places: Sequence[Place]) -> dict[str, list[int]]:
    """{topic: partitions}."""
    found: dict[str, list[int]] = {}
    for topic, partition in places:
        found.setdefault(topic, []).append(partition)
    return found


def commit(
    client: WireClient,
    version: int,
    entries: Mapping[Place, Committed],
    generation: int = -1,
    member: str = "",
    instance: str | None = None,
) -> dict[Place, Code]:
    """Commit offsets of group `g`; the code of each partition."""

    def write(out: Writer) -> None:
        out.string("g")
        out.int32(generation)
        out.string(member)
        if version >= 7:
            out.string(instance)
        if version <= 4:
            out.int64(-1)
        topics = by_topic(list(entries))
        out.length(len(topics))
        for topic, partitions in topics.items():
            out.string(topic)
            out.length(len(partitions))
            for partition in partitions:
                entry = entries[topic, partition]
                out.int32(partition)
                out.int64(entry.offset)
                if version >= 6:
                    out.int32(entry.leader_epoch)
                out.string(entry.metadata)

    codes = {}
    with client.asked(Api.OFFSET_COMMIT, version, write) as answer:
        if version >= 3:
            assert answer.int32() == 0
        for _ in range(answer.length()):
            topic = answer.string()
            codes.update({(topic, answer.int32()): Code(answer.int16()) for _ in range(answer.length())})
    return codes


def committed(
    client: WireClient, version: int, places: Sequence[Place] | None, stable: bool = False
) -> dict[Place, tuple[int, int, str, Code]]:
    """{place: (offset, leader epoch, metadata, code)} of group `g`."""

    def write(out: Writer) -> None:
        out.string("g")
        if places is None:
            out.length(-1)
        else:
            topics = by_topic(places)
            out.length(len(topics))
            for topic, partitions in topics.items():
                out.string(topic)
                out.array(partitions, out.int32)
                out.tags()
        if version >= 7:
            out.int8(stable)
        out.tags()

    found = {}
    with client.asked(Api.OFFSET_FETCH, version, write) as answer:
        if version >= 3:
            assert answer.int32() == 0
        for _ in range(answer.length()):
            topic = answer.string()
            for _ in range(answer.length()):
                place, offset = (topic, answer.int32()), answer.int64()
                epoch = answer.int32() if version >= 5 else -1
                found[place] = offset, epoch, answer.string(), Code(answer.int16())
                answer.tags()
            answer.tags()
        if version >= 2:
            assert answer.int16() == Code.NONE
        answer.tags()
    return found


@pytest.mark.parametrize("version", versions_of(Api.OFFSET_COMMIT))
def test_offsets_are_kept_and_unknown_partitions_told_apart(client: WireClient, version: int) -> None:
    entries = {
        ("t", 0): Committed(5, 3, "note ☃"),
        ("t", 1): Committed(0, -1, ""),
        ("t", 2): Committed(1, -1, ""),
        ("none", 0): Committed(1, -1, ""),
    }
    assert commit(client, version, entries) == {
        ("t", 0): Code.NONE,
        ("t", 1): Code.NONE,
        ("t", 2): Code.UNKNOWN_TOPIC_OR_PARTITION,
        ("none", 0): Code.UNKNOWN_TOPIC_OR_PARTITION,
    }
    epoch = 3 if version >= 6 else -1
    assert client.broker.offsets.of("g") == {("t", 0): Committed(5, epoch, "note ☃"), ("t", 1): Committed(0, -1, "")}


@pytest.mark.parametrize("version", versions_of(Api.OFFSET_FETCH))
def test_offsets_are_told_and_missing_ones_are_minus_one(client: WireClient, version: int) -> None:
    client.broker.offsets.commit("g", {("t", 0): Committed(5, 3, "m"), ("gone", 4): Committed(9, -1, "")})
    epoch = 3 if version >= 5 else -1
    assert committed(client, version, [("t", 1), ("t", 0), ("none", 0)]) == {
        ("t", 1): (-1, -1, "", Code.NONE),
        ("t", 0): (5, epoch, "m", Code.NONE),
        ("none", 0): (-1, -1, "", Code.NONE),
    }
    if version >= 2:
        assert committed(client, version, None) == {
            ("t", 0): (5, epoch, "m", Code.NONE),
            ("gone", 4): (9, -1, "", Code.NONE),
        }
    assert committed(client, version, []) == {}


def test_offsets_in_an_open_transaction_are_unstable_for_who_asks_for_stable_ones(client: WireClient) -> None:
    transactions = client.broker.transactions
    client.broker.offsets.commit("g", {("t", 0): Committed(5, -1, ""), ("t", 1): Committed(6, -1, "")})
    producer, epoch = transactions.init("id", 60_000, None, 0.0)
    transactions.add_offsets("id", producer, epoch, "g", {("t", 0): Committed(7, -1, "")}, 0.0)
    assert committed(client, 7, [("t", 0)])["t", 0] == (5, -1, "", Code.NONE)
    assert committed(client, 7, [("t", 0), ("t", 1)], stable=True) == {
        ("t", 0): (-1, -1, "", Code.UNSTABLE_OFFSET_COMMIT),
        ("t", 1): (6, -1, "", Code.NONE),
    }
    transactions.end("id", producer, epoch, True, 0.0)
    assert committed(client, 7, [("t", 0)], stable=True)["t", 0] == (7, -1, "", Code.NONE)


def _member(client: WireClient, instance: str | None = None) -> str:
    """A member of group `g`, generation 1, not yet assigned."""
    results: list[JoinResult] = []
    request = JoinRequest("g", "", instance, "c", "/h", 6_000, 10_000, "consumer", [("range", b"")], False)
    client.broker.groups.join(request, results.append, client.broker.times.now)
    client.broker.tick(client.broker.times)
    return results[-1].member_id


def test_only_members_of_the_generation_commit_while_a_group_has_members(client: WireClient) -> None:
    member = _member(client, "ops-0")
    entries = {("t", 0): Committed(5, -1, ""), ("none", 0): Committed(5, -1, "")}

    def codes(*who: object) -> set[Code]:
        return set(commit(client, 7, entries, *who).values())  # type: ignore[arg-type]

    assert codes(1, member, "ops-0") == {Code.REBALANCE_IN_PROGRESS}, "not assigned yet"
    client.broker.groups.sync("g", 1, member, "ops-0", {member: b""}, lambda _: None, 0.0)
    assert codes() == {Code.UNKNOWN_MEMBER_ID}
    assert codes(0, member, "ops-0") == {Code.ILLEGAL_GENERATION}
    assert codes(1, "other", None) == {Code.UNKNOWN_MEMBER_ID}
    assert codes(1, "other", "ops-0") == {Code.FENCED_INSTANCE_ID}
    assert client.broker.offsets.of("g") == {}
    assert codes(1, member, "ops-0") == {Code.NONE, Code.UNKNOWN_TOPIC_OR_PARTITION}
    assert client.broker.offsets.of("g")["t", 0].offset == 5


def test_a_full_disk_refuses_a_commit_retriably_and_keeps_the_old_offset(client: WireClient) -> None:
    assert commit(client, 7, {("t", 0): Committed(5, -1, "")}) == {("t", 0): Code.NONE}
    file = client.broker.topics._storage.files["offsets.jsonl"]  # type: ignore[attr-defined]
    file.limit = len(file.data)
    assert commit(client, 7, {("t", 0): Committed(6, -1, "")}) == {("t", 0): Code.COORDINATOR_NOT_AVAILABLE}
    assert committed(client, 7, [("t", 0)])["t", 0][0] == 5
    assert _deleted(client, "g", [("t", 0)])[0] is Code.COORDINATOR_NOT_AVAILABLE
    assert committed(client, 7, [("t", 0)])["t", 0][0] == 5
    file.limit = None
    assert commit(client, 7, {("t", 0): Committed(6, -1, "")}) == {("t", 0): Code.NONE}


def _deleted(client: WireClient, group: str, places: Sequence[Place]) -> tuple[Code, dict[Place, Code]]:
    def write(out: Writer) -> None:
        out.string(group)
        topics = by_topic(places)
        out.length(len(topics))
        for topic, partitions in topics.items():
            out.string(topic)
            out.array(partitions, out.int32)

    codes = {}
    with client.asked(Api.OFFSET_DELETE, 0, write) as answer:
        code = Code(answer.int16())
        assert answer.int32() == 0
        for _ in range(answer.length()):
            topic = answer.string()
            codes.update({(topic, answer.int32()): Code(answer.int16()) for _ in range(answer.length())})
    return code, codes


def test_some_offsets_of_a_group_without_members_are_deleted(client: WireClient) -> None:
    offsets = client.broker.offsets
    offsets.commit("g", {("t", n): Committed(n, -1, "") for n in range(2)})
    assert _deleted(client, "g", [("t", 0), ("t", 5)]) == (Code.NONE, {("t", 0): Code.NONE, ("t", 5): Code.NONE})
    assert list(offsets.of("g")) == [("t", 1)]
    assert _deleted(client, "unheard-of", [("t", 0)])[0] is Code.GROUP_ID_NOT_FOUND
    _member(client)
    assert _deleted(client, "g", [("t", 1)])[0] is Code.NON_EMPTY_GROUP
    assert list(offsets.of("g")) == [("t", 1)]
