"""Produce in every version: what is stored, what is refused with which code, and that errors stay where they belong."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from wire_client import WireClient, versions_of

from headrace.connectors.broker.batches import HEADER_SIZE, read_header
from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.wire import Writer

Build = Callable[..., bytearray]
Outcome = tuple[int, Code, int]


def _write(out: Writer, batches: dict[tuple[str, int], bytes | None], acks: int, transactional_id: str | None) -> None:
    out.string(transactional_id)
    out.int16(acks)
    out.int32(30_000)
    topics = sorted({topic for topic, _ in batches})
    out.length(len(topics))
    for topic in topics:
        out.string(topic)
        mine = {partition: data for (name, partition), data in batches.items() if name == topic}
        out.length(len(mine))
        for partition, data in mine.items():
            out.int32(partition)
            out.blob(data)


def produced(
    client: WireClient,
    version: int,
    batches: dict[tuple[str, int], bytes | None],
    transactional_id: str | None = None,
) -> dict[str, list[Outcome]]:
    """{topic: [(partition, code, base offset)]} of a produce that waits for its answer."""
    with client.asked(Api.PRODUCE, version, lambda out: _write(out, batches, -1, transactional_id)) as answer:
        found: dict[str, list[Outcome]] = {}
        for _ in range(answer.length()):
            rows = found.setdefault(answer.string(), [])
            for _ in range(answer.length()):
                rows.append((answer.int32(), Code(answer.int16()), answer.int64()))
                assert answer.int64() == -1, "log append time"
                if version >= 5:
                    assert answer.int64() == (0 if rows[-1][1] is Code.NONE else -1), "log start"
                if version >= 8:
                    assert answer.length() == 0, "no record is named"
                    assert (answer.nullable_string() is None) == (rows[-1][1] is Code.NONE)
        assert answer.int32() == 0, "throttle"
    return found


@pytest.mark.parametrize("version", versions_of(Api.PRODUCE))
def test_batches_of_several_partitions_are_stored(client: WireClient, batch: Build, version: int) -> None:
    client.broker.topics.create("u", 1, {})
    one, two, three = (bytes(batch([(b"k", b"v")] * n)) for n in (1, 2, 3))
    for turn in range(2):
        assert produced(client, version, {("t", 0): one, ("t", 1): two, ("u", 0): three}) == {
            "t": [(0, Code.NONE, turn), (1, Code.NONE, 2 * turn)],
            "u": [(0, Code.NONE, 3 * turn)],
        }
    log = client.broker.topics.log("t", 1)
    assert log is not None
    stored = log.segments[0].batch(1)
    assert stored[HEADER_SIZE:] == two[HEADER_SIZE:], "records as the client sent them"
    assert read_header(stored).base_offset == 2


@pytest.mark.parametrize("version", versions_of(Api.PRODUCE))
def test_an_error_of_one_partition_leaves_the_others_alone(client: WireClient, batch: Build, version: int) -> None:
    good = bytes(batch([(b"k", b"v")]))
    assert produced(client, version, {("none", 0): good, ("t", 0): good, ("t", 7): good, ("t", -1): good}) == {
        "none": [(0, Code.UNKNOWN_TOPIC_OR_PARTITION, -1)],
        "t": [
            (0, Code.NONE, 0),
            (7, Code.UNKNOWN_TOPIC_OR_PARTITION, -1),
            (-1, Code.UNKNOWN_TOPIC_OR_PARTITION, -1),
        ],
    }


def test_a_client_that_wants_no_answer_gets_none_and_its_records_are_stored(client: WireClient, batch: Build) -> None:
    good = bytes(batch([(b"k", b"v")]))
    assert client.send(Api.PRODUCE, 8, lambda out: _write(out, {("t", 0): good}, 0, None)) is None
    assert client.answers == []
    log = client.broker.topics.log("t", 0)
    assert log is not None
    assert log.end == 1


def _patched(data: bytes, at: int, layout: str, value: int) -> bytes:
    out = bytearray(data)
    struct.pack_into(layout, out, at, value)
    return bytes(out)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: None, Code.INVALID_RECORD),
        (lambda data: b"", Code.INVALID_RECORD),
        (lambda data: data[:60], Code.INVALID_RECORD),
        (lambda data: data[:-1], Code.INVALID_RECORD),
        (lambda data: data + data, Code.INVALID_RECORD),
        (lambda data: data + b"\0", Code.INVALID_RECORD),
        (lambda data: _patched(data, 16, ">b", 1), Code.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        (lambda data: _patched(data, 57, ">i", 0), Code.INVALID_RECORD),
        (lambda data: _patched(data, 57, ">i", 5), Code.INVALID_RECORD),
        (lambda data: _patched(data, 23, ">i", 5), Code.INVALID_RECORD),
        (lambda data: _patched(data, 21, ">h", 32), Code.INVALID_RECORD),
        (lambda data: _patched(data, 8, ">i", -1), Code.INVALID_RECORD),
    ],
    ids=[
        "null", "empty", "no header", "cut", "two", "longer", "format 1", "no records", "count", "last offset",
        "marker", "negative length",
    ],
)  # fmt: skip
def test_what_is_no_batch_is_refused_and_nothing_of_it_is_stored(
    client: WireClient, batch: Build, change: Callable[[bytes], bytes | None], code: Code
) -> None:
    whole = bytes(batch([(b"k", b"v"), (b"k", b"w")]))
    assert produced(client, 8, {("t", 0): change(whole), ("t", 1): whole}) == {"t": [(0, code, -1), (1, Code.NONE, 0)]}
    log = client.broker.topics.log("t", 0)
    assert log is not None
    assert (log.end, log.size) == (0, 0)


def test_a_batch_over_the_topics_limit_is_too_large(client: WireClient, batch: Build) -> None:
    small, large = bytes(batch([(b"k", b"v")])), bytes(batch([(b"k", b"v" * 200)]))
    client.broker.topics.create("narrow", 1, {"max.message.bytes": str(len(large) - 1)})
    assert produced(client, 3, {("narrow", 0): large}) == {"narrow": [(0, Code.MESSAGE_TOO_LARGE, -1)]}
    assert produced(client, 3, {("narrow", 0): small}) == {"narrow": [(0, Code.NONE, 0)]}


@pytest.mark.parametrize("codec", [0, 1, 4])
def test_a_compacted_topic_wants_keys_also_inside_compressed_batches(
    client: WireClient, batch: Build, codec: int
) -> None:
    client.broker.topics.create("table", 1, {"cleanup.policy": "compact"})
    good = bytes(batch([(b"k", b"v"), (b"", None)], codec=codec))
    bad = bytes(batch([(b"k", b"v"), (None, b"v")], codec=codec))
    assert produced(client, 8, {("table", 0): bad}) == {"table": [(0, Code.INVALID_RECORD, -1)]}
    assert produced(client, 8, {("table", 0): good}) == {"table": [(0, Code.NONE, 0)]}


@pytest.mark.parametrize("codec", [1, 4])
def test_a_compacted_topic_refuses_damaged_compression(client: WireClient, batch: Build, codec: int) -> None:
    client.broker.topics.create("table", 1, {"cleanup.policy": "compact"})
    data = batch([(b"k", b"v")], codec=codec)
    data[HEADER_SIZE:] = bytes(len(data) - HEADER_SIZE)
    assert produced(client, 8, {("table", 0): bytes(data)}) == {"table": [(0, Code.CORRUPT_MESSAGE, -1)]}


def test_repeats_are_answered_with_their_first_offset_and_gaps_are_refused(client: WireClient, batch: Build) -> None:
    def send(sequence: int, epoch: int = 0) -> Outcome:
        data = bytes(batch([(b"k", b"v")] * 2, 7, epoch, sequence))
        return produced(client, 8, {("t", 0): data})["t"][0]

    assert [send(0), send(2), send(0), send(2)] == [(0, Code.NONE, offset) for offset in (0, 2, 0, 2)]
    assert send(6)[1] is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert send(0, epoch=1) == (0, Code.NONE, 4)
    assert send(4)[1] is Code.INVALID_PRODUCER_EPOCH
    assert send(5, epoch=2)[1] is Code.OUT_OF_ORDER_SEQUENCE_NUMBER, "a new epoch begins at 0"


def test_transactional_batches_need_their_transaction(client: WireClient, batch: Build) -> None:
    transactions = client.broker.transactions
    producer, epoch = transactions.init("id", 60_000, None, 0.0)

    def send(partition: int, who: int, when: int, name: str | None = "id") -> Code:
        data = bytes(batch([(b"k", b"v")], who, when, 0, True))
        return produced(client, 8, {("t", partition): data}, name)["t"][0][1]

    assert send(0, producer, epoch) is Code.INVALID_TXN_STATE
    transactions.add_partitions("id", producer, epoch, [("t", 0)], 0.0)
    assert send(1, producer, epoch) is Code.INVALID_TXN_STATE
    assert send(0, producer + 1, epoch) is Code.INVALID_PRODUCER_ID_MAPPING
    assert send(0, producer, epoch + 1) is Code.INVALID_PRODUCER_EPOCH
    assert send(0, producer, epoch, "other") is Code.INVALID_PRODUCER_ID_MAPPING
    assert send(0, producer, epoch) is Code.NONE
    transactions.end("id", producer, epoch, True, 0.0)
    assert send(0, producer, epoch) is Code.INVALID_TXN_STATE


def test_a_full_disk_is_a_storage_error_that_a_client_may_try_again(client: WireClient, batch: Build) -> None:
    data = bytes(batch([(b"k", b"v")]))
    assert produced(client, 8, {("t", 0): data})["t"] == [(0, Code.NONE, 0)]
    file = client.broker.topics._storage.files["topics/t/0/00000000000000000000.log"]  # type: ignore[attr-defined]
    file.limit = len(file.data)
    assert produced(client, 8, {("t", 0): data})["t"] == [(0, Code.KAFKA_STORAGE_ERROR, -1)]
    file.limit = None
    assert produced(client, 8, {("t", 0): data})["t"] == [(0, Code.NONE, 1)]
