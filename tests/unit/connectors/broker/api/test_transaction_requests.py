"""Requests of transactional producers in every version: whole transactions in bytes, and codes that clients know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from wire_client import WireClient, versions_of

from headrace.connectors.broker.broker import Times
from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.groups import JoinRequest, JoinResult
from headrace.connectors.broker.offsets import Committed
from headrace.connectors.broker.wire import Writer

Build = Callable[..., bytearray]
Place = tuple[str, int]


def init(
    client: WireClient, version: int, name: str | None = "id", known: tuple[int, int] = (-1, -1), timeout: int = 60_000
) -> tuple[Code, int, int]:
    """(code, producer id, epoch)."""

    def write(out: Writer) -> None:
        out.string(name)
        out.int32(timeout)
        if version >= 3:
            out.int64(known[0])
            out.int16(known[1])
        out.tags()

    with client.asked(Api.INIT_PRODUCER_ID, version, write) as answer:
        assert answer.int32() == 0
        found = Code(answer.int16()), answer.int64(), answer.int16()
        answer.tags()
    return found


def add(client: WireClient, version: int, who: tuple[str, int, int], places: Sequence[Place]) -> dict[Place, Code]:
    """AddPartitionsToTxn; the code of each partition."""

    def write(out: Writer) -> None:
        out.string(who[0])
        out.int64(who[1])
        out.int16(who[2])
        topics = list(dict.fromkeys(topic for topic, _ in places))
        out.length(len(topics))
        for topic in topics:
            out.string(topic)
            out.array([partition for name, partition in places if name == topic], out.int32)

    codes = {}
    with client.asked(Api.ADD_PARTITIONS_TO_TXN, version, write) as answer:
        assert answer.int32() == 0
        for _ in range(answer.length()):
            topic = answer.string()
            codes.update({(topic, answer.int32()): Code(answer.int16()) for _ in range(answer.length())})
    return codes


def _one_code(client: WireClient, api: Api, version: int, write: Callable[[Writer], None]) -> Code:
    with client.asked(api, version, write) as answer:
        assert answer.int32() == 0
        return Code(answer.int16())


def announce(client: WireClient, version: int, who: tuple[str, int, int], group: str = "g") -> Code:
    """AddOffsetsToTxn."""

    def write(out: Writer) -> None:
        out.string(who[0])
        out.int64(who[1])
        out.int16(who[2])
        out.string(group)

    return _one_code(client, Api.ADD_OFFSETS_TO_TXN, version, write)


def end(client: WireClient, version: int, who: tuple[str, int, int], commit: bool) -> Code:
    """EndTxn."""

    def write(out: Writer) -> None:
        out.string(who[0])
        out.int64(who[1])
        out.int16(who[2])
        out.int8(commit)

    return _one_code(client, Api.END_TXN, version, write)


def commit_offsets(
    client: WireClient,
    version: int,
    who: tuple[str, int, int],
    entries: Mapping[Place, Committed],
    membership: tuple[int, str, str | None] = (-1, "", None),
) -> dict[Place, Code]:
    """TxnOffsetCommit of group `g`; the code of each partition."""

    def write(out: Writer) -> None:
        out.string(who[0])
        out.string("g")
        out.int64(who[1])
        out.int16(who[2])
        if version >= 3:
            out.int32(membership[0])
            out.string(membership[1])
            out.string(membership[2])
        topics = list(dict.fromkeys(topic for topic, _ in entries))
        out.length(len(topics))
        for topic in topics:
            out.string(topic)
            mine = {partition: entry for (name, partition), entry in entries.items() if name == topic}
            out.length(len(mine))
            for partition, entry in mine.items():
                out.int32(partition)
                out.int64(entry.offset)
                if version >= 2:
                    out.int32(entry.leader_epoch)
                out.string(entry.metadata)
                out.tags()
            out.tags()
        out.tags()

    codes = {}
    with client.asked(Api.TXN_OFFSET_COMMIT, version, write) as answer:
        assert answer.int32() == 0
        for _ in range(answer.length()):
            topic = answer.string()
            for _ in range(answer.length()):
                place = topic, answer.int32()
                codes[place] = Code(answer.int16())
                answer.tags()
            answer.tags()
        answer.tags()
    return codes


@pytest.mark.parametrize("version", versions_of(Api.INIT_PRODUCER_ID))
def test_producers_get_ids_and_a_transactional_id_a_new_epoch_each_time(client: WireClient, version: int) -> None:
    ids = [init(client, version, None) for _ in range(3)]
    assert len({producer for _, producer, _ in ids}) == 3
    assert {(code, epoch) for code, _, epoch in ids} == {(Code.NONE, 0)}
    (_, one, _), again = init(client, version), init(client, version)
    assert again == (Code.NONE, one, 1)
    assert init(client, version, "other")[1] != one
    assert one not in {producer for _, producer, _ in ids}


@pytest.mark.parametrize("version", versions_of(Api.INIT_PRODUCER_ID))
@pytest.mark.parametrize(
    ("name", "timeout", "code"),
    [
        ("", 60_000, Code.INVALID_REQUEST),
        ("id", 0, Code.INVALID_TRANSACTION_TIMEOUT),
        ("id", -1, Code.INVALID_TRANSACTION_TIMEOUT),
        ("id", 900_001, Code.INVALID_TRANSACTION_TIMEOUT),
    ],
)
def test_ids_and_timeouts_that_cannot_be_are_refused(
    client: WireClient, version: int, name: str, timeout: int, code: Code
) -> None:
    assert init(client, version, name, timeout=timeout) == (code, -1, -1)


@pytest.mark.parametrize(("version", "told"), [(3, Code.INVALID_PRODUCER_EPOCH), (4, Code.PRODUCER_FENCED)])
def test_a_producer_raises_its_own_epoch_and_a_fenced_one_is_told(client: WireClient, version: int, told: Code) -> None:
    _, producer, epoch = init(client, version)
    assert init(client, version, known=(producer, epoch)) == (Code.NONE, producer, epoch + 1)
    assert init(client, version, known=(producer, epoch)) == (told, -1, -1)


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("version", versions_of(Api.END_TXN))
def test_a_transaction_in_bytes(client: WireClient, batch: Build, version: int, commit: bool) -> None:
    _, producer, epoch = init(client, 4)
    who = ("id", producer, epoch)
    assert add(client, version, who, [("t", 0), ("t", 1)]) == {("t", 0): Code.NONE, ("t", 1): Code.NONE}
    assert add(client, version, who, [("t", 0)]) == {("t", 0): Code.NONE}, "once more"
    log = client.broker.topics.log("t", 0)
    assert log is not None
    log.append(batch([(b"k", b"v")], producer, epoch, 0, True), 0)
    assert announce(client, version, who) is Code.NONE
    entries = {("t", 1): Committed(7, -1, "note"), ("none", 0): Committed(1, -1, "")}
    assert commit_offsets(client, version, who, entries) == {
        ("t", 1): Code.NONE,
        ("none", 0): Code.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert log.last_stable_offset == 0
    assert end(client, version, who, commit) is Code.NONE
    assert end(client, version, who, commit) is Code.NONE, "a repeat is answered as before"
    assert end(client, version, who, not commit) is Code.INVALID_TXN_STATE
    assert log.last_stable_offset == log.end == 2
    assert log.aborted_between(0, 2) == ([] if commit else [(producer, 0)])
    assert client.broker.offsets.of("g") == ({("t", 1): Committed(7, -1, "note")} if commit else {})


@pytest.mark.parametrize("version", versions_of(Api.TXN_OFFSET_COMMIT))
def test_leader_epochs_of_offsets_travel_from_version_2_on(client: WireClient, version: int) -> None:
    _, producer, epoch = init(client, 4)
    who = ("id", producer, epoch)
    assert announce(client, 0, who) is Code.NONE
    assert commit_offsets(client, version, who, {("t", 0): Committed(7, 4, "")}) == {("t", 0): Code.NONE}
    assert end(client, 0, who, True) is Code.NONE
    assert client.broker.offsets.of("g")["t", 0].leader_epoch == (4 if version >= 2 else -1)


def test_all_partitions_are_added_or_none(client: WireClient) -> None:
    _, producer, epoch = init(client, 4)
    who = ("id", producer, epoch)
    assert add(client, 2, who, [("t", 0), ("none", 0), ("t", 9)]) == {
        ("t", 0): Code.OPERATION_NOT_ATTEMPTED,
        ("none", 0): Code.UNKNOWN_TOPIC_OR_PARTITION,
        ("t", 9): Code.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert end(client, 2, who, True) is Code.INVALID_TXN_STATE, "nothing was opened"


@pytest.mark.parametrize("version", range(3))
def test_fenced_producers_are_told_in_the_words_of_their_version(client: WireClient, version: int) -> None:
    _, producer, epoch = init(client, 4)
    assert init(client, 4)[2] == epoch + 1
    old = ("id", producer, epoch)
    fenced = Code.PRODUCER_FENCED if version >= 2 else Code.INVALID_PRODUCER_EPOCH
    assert add(client, version, old, [("t", 0)]) == {("t", 0): fenced}
    assert announce(client, version, old) is fenced
    assert end(client, version, old, True) is fenced
    assert commit_offsets(client, version, old, {("t", 0): Committed(1, -1, "")}) == {
        ("t", 0): Code.INVALID_PRODUCER_EPOCH
    }


@pytest.mark.parametrize("who", [("unheard-of", 1, 0), ("id", 999_999, 0)])
def test_strangers_have_no_mapping(client: WireClient, who: tuple[str, int, int]) -> None:
    init(client, 4)
    assert add(client, 2, who, [("t", 0)]) == {("t", 0): Code.INVALID_PRODUCER_ID_MAPPING}
    assert announce(client, 2, who) is Code.INVALID_PRODUCER_ID_MAPPING
    assert end(client, 2, who, False) is Code.INVALID_PRODUCER_ID_MAPPING


def test_offsets_in_a_transaction_are_checked_against_the_membership_they_name(client: WireClient) -> None:
    results: list[JoinResult] = []
    request = JoinRequest("g", "", "ops-0", "c", "/h", 6_000, 10_000, "consumer", [("range", b"")], False)
    client.broker.groups.join(request, results.append, 0.0)
    client.broker.tick(Times(0.1, 0))
    member = results[-1].member_id
    _, producer, epoch = init(client, 4)
    who, place = ("id", producer, epoch), ("t", 0)
    announce(client, 2, who)

    def code(*membership: object) -> Code:
        return commit_offsets(client, 3, who, {place: Committed(7, -1, "")}, membership)[place]  # type: ignore[arg-type]

    assert code(0, member, "ops-0") is Code.ILLEGAL_GENERATION
    assert code(1, "other", None) is Code.UNKNOWN_MEMBER_ID
    assert code(1, "other", "ops-0") is Code.FENCED_INSTANCE_ID
    assert not client.broker.offsets.is_pending("g", place)
    assert code(1, member, "ops-0") is Code.NONE
    assert code(-1, "", None) is Code.NONE, "old clients name no membership"
    assert client.broker.offsets.is_pending("g", place)


def test_a_refused_journal_asks_the_client_to_repeat(client: WireClient) -> None:
    _, producer, epoch = init(client, 4)
    who = ("id", producer, epoch)
    file = client.broker.topics._storage.files["transactions.jsonl"]  # type: ignore[attr-defined]
    file.limit = len(file.data)
    assert init(client, 4, "new") == (Code.COORDINATOR_NOT_AVAILABLE, -1, -1)
    assert init(client, 4, None) == (Code.COORDINATOR_NOT_AVAILABLE, -1, -1)
    assert add(client, 2, who, [("t", 0)]) == {("t", 0): Code.COORDINATOR_NOT_AVAILABLE}
    assert announce(client, 2, who) is Code.COORDINATOR_NOT_AVAILABLE
    file.limit = None
    assert add(client, 2, who, [("t", 0)]) == {("t", 0): Code.NONE}
    file.limit = len(file.data)
    assert end(client, 2, who, True) is Code.COORDINATOR_NOT_AVAILABLE
    file.limit = None
    assert end(client, 2, who, True) is Code.NONE


def test_a_transaction_that_lasts_too_long_is_aborted_and_its_producer_fenced(client: WireClient, batch: Build) -> None:
    _, producer, epoch = init(client, 4, timeout=1_000)
    who = ("id", producer, epoch)
    add(client, 2, who, [("t", 0)])
    log = client.broker.topics.log("t", 0)
    assert log is not None
    log.append(batch([(b"k", b"v")], producer, epoch, 0, True), 0)
    client.broker.tick(Times(0.9, 0))
    assert log.last_stable_offset == 0
    client.broker.tick(Times(1.1, 0))
    assert log.aborted_between(0, log.end) == [(producer, 0)]
    assert end(client, 2, who, True) is Code.PRODUCER_FENCED
    assert init(client, 4) == (Code.NONE, producer, epoch + 2)
