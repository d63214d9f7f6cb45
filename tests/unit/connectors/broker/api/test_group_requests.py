"""Requests of consumer groups in every version: a whole life of a group in bytes, and what tools are told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from wire_client import WireClient, assert_read, versions_of

from headrace.connectors.broker.broker import Times
from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.offsets import Committed
from headrace.connectors.broker.wire import Reader, Writer


class Joined:
    """A JoinGroup response, read to its last byte."""

    def __init__(self, answer: Reader, version: int) -> None:
        if version >= 2:
            assert answer.int32() == 0
        self.code, self.generation = Code(answer.int16()), answer.int32()
        self.protocol, self.leader, self.member_id = answer.string(), answer.string(), answer.string()

        def member() -> tuple[str, str | None, bytes]:
            name = answer.string()
            instance = answer.nullable_string() if version >= 5 else None
            return name, instance, bytes(answer.nullable_bytes() or b"")

        self.members = answer.array(member)
        assert_read(answer)


def join(
    client: WireClient,
    version: int,
    member: str = "",
    instance: str | None = None,
    group: str = "g",
    protocols: Sequence[tuple[str, bytes]] = (("range", b"\1\2"),),
    session: int = 6_000,
) -> None:
    """Send a join; its answer comes when the generation is complete."""

    def write(out: Writer) -> None:
        out.string(group)
        out.int32(session)
        if version >= 1:
            out.int32(10_000)
        out.string(member)
        if version >= 5:
            out.string(instance)
        out.string("consumer")
        out.length(len(protocols))
        for name, metadata in protocols:
            out.string(name)
            out.blob(metadata)

    client.send(Api.JOIN_GROUP, version, write)


def joined(client: WireClient, version: int, instance: str | None = None, group: str = "g") -> Joined:
    """Join a group and get its answer, by way of MEMBER_ID_REQUIRED where the version asks for it."""
    join(client, version, instance=instance, group=group)
    client.broker.tick(client.broker.times)
    first = Joined(client.answers[-1], version)
    if first.code is not Code.MEMBER_ID_REQUIRED:
        return first
    assert version >= 4
    assert instance is None
    join(client, version, first.member_id, group=group)
    client.broker.tick(client.broker.times)
    return Joined(client.answers[-1], version)


def sync(client: WireClient, version: int, generation: int, member: str, given: dict[str, bytes]) -> tuple[Code, bytes]:
    """(code, assignment) of a sync that is answered at once."""

    def write(out: Writer) -> None:
        out.string("g")
        out.int32(generation)
        out.string(member)
        if version >= 3:
            out.string(None)
        out.length(len(given))
        for name, assignment in given.items():
            out.string(name)
            out.blob(assignment)

    with client.asked(Api.SYNC_GROUP, version, write) as answer:
        if version >= 1:
            assert answer.int32() == 0
        return Code(answer.int16()), bytes(answer.nullable_bytes() or b"")


def heartbeat(client: WireClient, version: int, generation: int, member: str) -> Code:
    """The code of a heartbeat."""

    def write(out: Writer) -> None:
        out.string("g")
        out.int32(generation)
        out.string(member)
        if version >= 3:
            out.string(None)

    with client.asked(Api.HEARTBEAT, version, write) as answer:
        if version >= 1:
            assert answer.int32() == 0
        return Code(answer.int16())


def leave(client: WireClient, version: int, members: Sequence[tuple[str, str | None]]) -> list[Code]:
    """The code for each member (below version 3: one member)."""

    def write(out: Writer) -> None:
        out.string("g")
        if version < 3:
            out.string(members[0][0])
            return
        out.length(len(members))
        for member, instance in members:
            out.string(member)
            out.string(instance)

    with client.asked(Api.LEAVE_GROUP, version, write) as answer:
        if version >= 1:
            assert answer.int32() == 0
        code = Code(answer.int16())
        if version < 3:
            return [code]
        assert code is Code.NONE
        rows = answer.array(lambda: (answer.string(), answer.nullable_string(), Code(answer.int16())))
        assert [row[:2] for row in rows] == list(members)
        return [row[2] for row in rows]


def described(client: WireClient, version: int, names: Sequence[str]) -> dict[str, tuple[str, str, str, list[bytes]]]:
    """{group: (state, type, protocol, assignments)}."""

    def write(out: Writer) -> None:
        out.array(names, out.string)
        if version >= 3:
            out.int8(0)

    found = {}
    with client.asked(Api.DESCRIBE_GROUPS, version, write) as answer:
        if version >= 1:
            assert answer.int32() == 0

        def member() -> bytes:
            assert answer.string()
            if version >= 4:
                answer.nullable_string()
            assert answer.string() == "test", "client id"
            assert answer.string() == "/127.0.0.1"
            answer.nullable_bytes()
            return bytes(answer.nullable_bytes() or b"")

        for _ in range(answer.length()):
            assert answer.int16() == Code.NONE
            name = answer.string()
            found[name] = answer.string(), answer.string(), answer.string(), answer.array(member)
            if version >= 3:
                assert answer.int32() == -(2**31)
    return found


def listed(client: WireClient, version: int, states: Sequence[str] = ()) -> dict[str, str]:
    """{group: type}; of version 4 {group: type, state}."""

    def group() -> tuple[str, str]:
        name, about = answer.string(), answer.string()
        if version >= 4:
            about += f", {answer.string()}"
        answer.tags()
        return name, about

    def write(out: Writer) -> None:
        if version >= 4:
            out.array(states, out.string)
        out.tags()

    with client.asked(Api.LIST_GROUPS, version, write) as answer:
        if version >= 1:
            assert answer.int32() == 0
        assert answer.int16() == Code.NONE
        found = dict(answer.array(group))
        answer.tags()
        return found


def deleted(client: WireClient, version: int, names: Sequence[str]) -> dict[str, Code]:
    """{group: code}."""
    with client.asked(Api.DELETE_GROUPS, version, lambda out: out.array(names, out.string)) as answer:
        assert answer.int32() == 0
        return dict(answer.array(lambda: (answer.string(), Code(answer.int16()))))


@pytest.mark.parametrize("version", versions_of(Api.JOIN_GROUP))
def test_a_group_of_one_lives_through_every_version(client: WireClient, version: int) -> None:
    first = joined(client, version)
    assert (first.code, first.generation, first.protocol) == (Code.NONE, 1, "range")
    assert first.leader == first.member_id
    assert first.members == [(first.member_id, None, b"\1\2")]
    other = min(version, 3)
    assert sync(client, other, 1, first.member_id, {first.member_id: b"mine"}) == (Code.NONE, b"mine")
    assert sync(client, other, 1, first.member_id, {}) == (Code.NONE, b"mine"), "asked again"
    assert heartbeat(client, other, 1, first.member_id) is Code.NONE
    assert heartbeat(client, other, 2, first.member_id) is Code.ILLEGAL_GENERATION
    assert heartbeat(client, other, 1, "nobody") is Code.UNKNOWN_MEMBER_ID
    assert leave(client, other, [(first.member_id, None)]) == [Code.NONE]
    assert leave(client, other, [(first.member_id, None)]) == [Code.UNKNOWN_MEMBER_ID]
    assert heartbeat(client, other, 1, first.member_id) is Code.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("version", versions_of(Api.JOIN_GROUP))
@pytest.mark.parametrize(
    ("over", "code"),
    [
        ({"group": ""}, Code.INVALID_GROUP_ID),
        ({"session": 99}, Code.INVALID_SESSION_TIMEOUT),
        ({"session": 1_800_001}, Code.INVALID_SESSION_TIMEOUT),
        ({"protocols": ()}, Code.INCONSISTENT_GROUP_PROTOCOL),
        ({"member": "never-seen"}, Code.UNKNOWN_MEMBER_ID),
    ],
)
def test_joins_that_are_refused_are_answered_at_once(
    client: WireClient, version: int, over: dict[str, object], code: Code
) -> None:
    join(client, version, **over)  # type: ignore[arg-type]
    answer = Joined(client.answers[-1], version)
    assert (answer.code, answer.generation, answer.members) == (code, -1, [])


def test_members_of_every_version_form_one_generation(client: WireClient) -> None:
    """Old and new clients in one group: only the leader is told who is in it."""
    clients = [WireClient(client.broker) for _ in versions_of(Api.JOIN_GROUP)]
    for version, one in enumerate(clients):
        join(one, version)
    for version, one in enumerate(clients):
        if version >= 4:
            told = Joined(one.answers.pop(), version)
            assert told.code is Code.MEMBER_ID_REQUIRED
            join(one, version, told.member_id)
    for turn in range(3):
        for version, one in enumerate(clients):
            if one.answers:
                told = Joined(one.answers.pop(), version)
                join(one, version, told.member_id)
        client.broker.tick(Times(turn * 0.1, 0))
    results = [Joined(one.answers[-1], version) for version, one in enumerate(clients) if one.answers]
    assert len(results) == len(clients)
    assert len({result.generation for result in results}) == 1
    assert sorted(len(result.members) for result in results) == [0] * (len(clients) - 1) + [len(clients)]


def test_the_leader_is_told_instances_from_version_5_on(client: WireClient) -> None:
    answer = joined(client, 5, instance="ops-0")
    assert answer.members == [(answer.member_id, "ops-0", b"\1\2")]
    assert answer.member_id.startswith("ops-0-")


def test_version_3_lets_several_members_leave_by_id_or_instance(client: WireClient) -> None:
    one = joined(client, 5, instance="ops-0")
    wrong = [("", "ops-9"), ("nobody", None), (one.member_id, "ops-1")]
    assert leave(client, 3, wrong) == [Code.UNKNOWN_MEMBER_ID] * 3
    assert leave(client, 3, [("", "ops-0")]) == [Code.NONE]
    assert described(client, 4, ["g"])["g"][0] == "Empty"


@pytest.mark.parametrize("version", versions_of(Api.DESCRIBE_GROUPS))
def test_groups_are_described_in_every_state(client: WireClient, version: int) -> None:
    client.broker.offsets.commit("only-offsets", {("t", 0): Committed(5, -1, "")})
    member = joined(client, 3)
    assert described(client, version, ["g"])["g"] == ("CompletingRebalance", "consumer", "range", [b""])
    sync(client, 3, 1, member.member_id, {member.member_id: b"mine"})
    assert described(client, version, ["g", "only-offsets", "none"]) == {
        "g": ("Stable", "consumer", "range", [b"mine"]),
        "only-offsets": ("Empty", "consumer", "", []),
        "none": ("Dead", "consumer", "", []),
    }


@pytest.mark.parametrize("version", versions_of(Api.LIST_GROUPS))
def test_groups_with_members_or_offsets_are_listed(client: WireClient, version: int) -> None:
    assert listed(client, version) == {}
    client.broker.offsets.commit("only-offsets", {("t", 0): Committed(5, -1, "")})
    member = joined(client, 3)
    if version < 4:
        assert listed(client, version) == {"only-offsets": "", "g": "consumer"}
        return
    assert listed(client, version) == {"only-offsets": ", Empty", "g": "consumer, CompletingRebalance"}
    assert listed(client, version, ["Empty", "Dead"]) == {"only-offsets": ", Empty"}
    leave(client, 0, [(member.member_id, None)])
    assert listed(client, version)["g"].endswith(", Empty")


@pytest.mark.parametrize("version", versions_of(Api.DELETE_GROUPS))
def test_a_group_is_deleted_with_its_offsets_unless_somebody_is_in_it(client: WireClient, version: int) -> None:
    offsets = client.broker.offsets
    for group in ("g", "only-offsets"):
        offsets.commit(group, {("t", 0): Committed(5, -1, "")})
    member = joined(client, 3)
    assert deleted(client, version, ["g", "only-offsets", "none"]) == {
        "g": Code.NON_EMPTY_GROUP,
        "only-offsets": Code.NONE,
        "none": Code.GROUP_ID_NOT_FOUND,
    }
    assert offsets.groups() == ["g"]
    leave(client, 0, [(member.member_id, None)])
    assert deleted(client, version, ["g"]) == {"g": Code.NONE}
    assert offsets.groups() == []
    assert listed(client, 0) == {}


def test_a_full_disk_keeps_the_offsets_of_a_group_and_says_so(client: WireClient) -> None:
    client.broker.offsets.commit("g", {("t", 0): Committed(5, -1, "")})
    file = client.broker.topics._storage.files["offsets.jsonl"]  # type: ignore[attr-defined]
    file.limit = len(file.data)
    assert deleted(client, 1, ["g"]) == {"g": Code.COORDINATOR_NOT_AVAILABLE}
    assert client.broker.offsets.groups() == ["g"]
    file.limit = None
    assert deleted(client, 1, ["g"]) == {"g": Code.NONE}
