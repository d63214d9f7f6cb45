"""Fetch and ListOffsets in every version: bytes as stored, limits kept, aborted data named, offsets by time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from wire_client import WireClient, assert_read, versions_of

from headrace.connectors.broker.api import fetch
from headrace.connectors.broker.batches import read_header
from headrace.connectors.broker.broker import Times
from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.log import PartitionLog
from headrace.connectors.broker.wire import Reader, Writer

Build = Callable[..., bytearray]
Wanted = tuple[str, int, int]
"""(topic, partition, offset)"""


class Got(NamedTuple):
    """One partition of a response."""

    code: Code
    end: int
    stable: int
    aborted: list[tuple[int, int]] | None
    data: bytes

    @property
    def offsets(self) -> list[int]:
        """Base offsets of the batches."""
        found, at = [], 0
        while at < len(self.data):
            header = read_header(self.data, at)
            found.append(header.base_offset)
            at += header.size
        return found


def _write(
    out: Writer, version: int, wanted: Sequence[Wanted], *, most: int, each: int, committed: bool, wait: int, least: int
) -> None:
    out.int32(-1)
    out.int32(wait)
    out.int32(least)
    out.int32(most)
    out.int8(committed)
    if version >= 7:
        out.int32(0)
        out.int32(-1)
    topics = list(dict.fromkeys(topic for topic, _, _ in wanted))
    out.length(len(topics))
    for topic in topics:
        out.string(topic)
        mine = [(partition, offset) for name, partition, offset in wanted if name == topic]
        out.length(len(mine))
        for partition, offset in mine:
            out.int32(partition)
            if version >= 9:
                out.int32(-1)
            out.int64(offset)
            if version >= 5:
                out.int64(-1)
            out.int32(each)
    if version >= 7:
        out.length(0)
    if version >= 11:
        out.string("")


def fetched(reader: Reader, version: int) -> dict[tuple[str, int], Got]:
    """A response, read to its last byte."""
    assert reader.int32() == 0
    if version >= 7:
        assert (reader.int16(), reader.int32()) == (0, 0), "no session"
    found: dict[tuple[str, int], Got] = {}
    for _ in range(reader.length()):
        topic = reader.string()
        for _ in range(reader.length()):
            partition, code, end, stable = reader.int32(), Code(reader.int16()), reader.int64(), reader.int64()
            if version >= 5:
                assert reader.int64() in (-1, 0), "log start"
            aborted = reader.nullable_array(lambda: (reader.int64(), reader.int64()))
            if version >= 11:
                assert reader.int32() == -1, "preferred replica"
            found[topic, partition] = Got(code, end, stable, aborted, bytes(reader.nullable_bytes() or b""))
    assert_read(reader)
    return found


def _fetch(
    client: WireClient,
    version: int,
    wanted: Sequence[Wanted],
    *,
    most: int = 1 << 20,
    each: int = 1 << 20,
    committed: bool = False,
    wait: int = 0,
    least: int = 1,
) -> dict[tuple[str, int], Got]:
    def write(out: Writer) -> None:
        _write(out, version, wanted, most=most, each=each, committed=committed, wait=wait, least=least)

    return fetched(client.sent(Api.FETCH, version, write), version)


def _log(client: WireClient, topic: str = "t", partition: int = 0) -> PartitionLog:
    log = client.broker.topics.log(topic, partition)
    assert log is not None
    return log


@pytest.mark.parametrize("version", versions_of(Api.FETCH))
def test_batches_come_as_they_were_stored(client: WireClient, batch: Build, version: int) -> None:
    stored = [batch([(b"k", b"v" * 10)] * n) for n in (1, 2, 3)]
    for data in stored:
        _log(client).append(data, 0)
    got = _fetch(client, version, [("t", 0, 0), ("t", 1, 0), ("none", 3, 5)])
    assert got["t", 0] == Got(Code.NONE, 6, 6, None, b"".join(bytes(data) for data in stored))
    assert got["t", 1] == Got(Code.NONE, 0, 0, None, b"")
    assert got["none", 3] == Got(Code.UNKNOWN_TOPIC_OR_PARTITION, -1, -1, None, b"")
    middle = _fetch(client, version, [("t", 0, 2)])["t", 0]
    assert middle.offsets == [1, 3], "from the batch that holds the offset"


@pytest.mark.parametrize("version", versions_of(Api.FETCH))
def test_offsets_outside_the_log_are_out_of_range(client: WireClient, batch: Build, version: int) -> None:
    _log(client).append(batch([(b"k", b"v")] * 3), 0)
    assert _fetch(client, version, [("t", 0, 3)])["t", 0].code is Code.NONE
    for offset in (-1, 4, 2**62):
        got = _fetch(client, version, [("t", 0, offset)], wait=500)["t", 0]
        assert (got.code, got.end, got.data) == (Code.OFFSET_OUT_OF_RANGE, 3, b"")


def test_a_committed_reader_gets_no_open_data_and_is_told_of_aborted(client: WireClient, batch: Build) -> None:
    log = _log(client)
    log.append(batch([(b"k", b"v")], 1, 0, 0, True), 0)
    log.append(batch([(b"k", b"v")], 2, 0, 0, True), 0)
    log.append_marker(1, 0, False, 0)
    plain, committed = (_fetch(client, 11, [("t", 0, 0)], committed=only)["t", 0] for only in (False, True))
    assert (plain.end, plain.stable, plain.offsets, plain.aborted) == (3, 1, [0, 1, 2], None)
    assert (committed.end, committed.stable, committed.offsets, committed.aborted) == (3, 1, [0], [(1, 0)])
    log.append_marker(2, 0, True, 0)
    committed = _fetch(client, 11, [("t", 0, 1)], committed=True)["t", 0]
    assert (committed.stable, committed.offsets, committed.aborted) == (4, [1, 2, 3], [(1, 0)])
    assert _fetch(client, 11, [("t", 0, 3)], committed=True)["t", 0].aborted == []


@pytest.mark.parametrize("each", [1, 100, 1 << 20])
def test_a_first_batch_comes_whole_however_small_the_limits(client: WireClient, batch: Build, each: int) -> None:
    for partition in (0, 1):
        for _ in range(3):
            _log(client, partition=partition).append(batch([(b"k", b"v" * 300)]), 0)
    size = _log(client).size // 3
    got = _fetch(client, 11, [("t", 0, 0), ("t", 1, 0)], most=1, each=each)
    assert got["t", 0].offsets == [0]
    assert got["t", 1].offsets == [], "one batch is the least, not one for each partition"
    got = _fetch(client, 11, [("t", 0, 0), ("t", 1, 0)], most=5 * size, each=2 * size)
    assert (got["t", 0].offsets, got["t", 1].offsets) == ([0, 1], [0, 1])
    got = _fetch(client, 11, [("t", 0, 0), ("t", 1, 0)], most=3 * size, each=2 * size)
    assert (got["t", 0].offsets, got["t", 1].offsets) == ([0, 1], [0])


def test_large_pieces_are_sent_from_the_file_between_the_fields(client: WireClient, batch: Build) -> None:
    data = [batch([(b"k", bytes([n]) * (fetch._SMALL + 10))]) for n in range(2)]
    for partition in (0, 1):
        _log(client, partition=partition).append(data[partition], 0)
    got = _fetch(client, 11, [("t", 0, 0), ("t", 1, 0)])
    assert [got["t", n].data for n in (0, 1)] == [bytes(one) for one in data]


def test_a_fetch_that_needs_more_bytes_waits_and_one_that_needs_none_does_not(client: WireClient, batch: Build) -> None:
    _log(client).append(batch([(b"k", b"v")]), 0)
    size = _log(client).size
    assert _fetch(client, 11, [("t", 0, 1)], wait=500, least=0)["t", 0].data == b""
    assert _fetch(client, 11, [("t", 0, 0)], wait=500, least=size)["t", 0].offsets == [0]

    def write(out: Writer) -> None:
        _write(out, 11, [("t", 0, 0)], most=1 << 20, each=1 << 20, committed=False, wait=500, least=size + 1)

    call = client.send(Api.FETCH, 11, write)
    assert call is not None
    assert call.hurry is None, "an answer with fewer bytes than asked for would be wrong"
    _log(client).append(batch([(b"k", b"v")]), 0)
    client.broker.waiting.answer_marked()
    assert fetched(client.answers[-1], 11)["t", 0].offsets == [0, 1]


def test_a_waiting_fetch_may_be_hurried_by_the_next_request_of_its_connection(client: WireClient) -> None:
    def write(out: Writer) -> None:
        _write(out, 4, [("t", 0, 0)], most=1 << 20, each=1 << 20, committed=False, wait=500, least=1)

    call = client.send(Api.FETCH, 4, write)
    assert call is not None
    assert call.hurry is not None
    call.hurry()
    assert fetched(client.answers[-1], 4)["t", 0] == Got(Code.NONE, 0, 0, None, b"")
    client.broker.waiting.expire(10.0)
    assert len(client.answers) == 1, "answered once"


def test_a_fetch_of_a_topic_that_is_deleted_meanwhile_is_answered(client: WireClient) -> None:
    def write(out: Writer) -> None:
        _write(out, 11, [("t", 0, 0)], most=1 << 20, each=1 << 20, committed=False, wait=500, least=1)

    assert client.send(Api.FETCH, 11, write) is not None
    client.broker.topics.delete("t")
    client.broker.waiting.answer_marked()
    client.broker.waiting.expire(client.broker.times.now + 1)
    assert len(client.answers) == 1
    assert client.broker.waiting.next_deadline() is None


def _offsets(
    client: WireClient, version: int, places: Sequence[tuple[str, int, int]], committed: bool = False
) -> dict[tuple[str, int], tuple[Code, int, int]]:
    """{(topic, partition): (code, timestamp, offset)}."""

    def write(out: Writer) -> None:
        out.int32(-1)
        if version >= 2:
            out.int8(committed)
        topics = list(dict.fromkeys(topic for topic, _, _ in places))
        out.length(len(topics))
        for topic in topics:
            out.string(topic)
            mine = [(partition, at) for name, partition, at in places if name == topic]
            out.length(len(mine))
            for partition, timestamp in mine:
                out.int32(partition)
                if version >= 4:
                    out.int32(-1)
                out.int64(timestamp)

    found = {}
    with client.asked(Api.LIST_OFFSETS, version, write) as answer:
        if version >= 2:
            assert answer.int32() == 0
        for _ in range(answer.length()):
            topic = answer.string()
            for _ in range(answer.length()):
                place = topic, answer.int32()
                found[place] = Code(answer.int16()), answer.int64(), answer.int64()
                if version >= 4:
                    assert answer.int32() == (0 if found[place][0] is Code.NONE else -1), "leader epoch"
    return found


@pytest.mark.parametrize("version", versions_of(Api.LIST_OFFSETS))
def test_first_and_end_offsets(client: WireClient, batch: Build, version: int) -> None:
    for _ in range(2):
        _log(client).append(batch([(b"k", b"v")] * 3), 0)
    client.broker.topics.delete_records("t", 0, 2)
    assert _offsets(client, version, [("t", 0, -2), ("t", 1, -2), ("none", 0, -2)]) == {
        ("t", 0): (Code.NONE, -1, 2),
        ("t", 1): (Code.NONE, -1, 0),
        ("none", 0): (Code.UNKNOWN_TOPIC_OR_PARTITION, -1, -1),
    }
    assert _offsets(client, version, [("t", 0, -1), ("t", 1, -1)]) == {
        ("t", 0): (Code.NONE, -1, 6),
        ("t", 1): (Code.NONE, -1, 0),
    }


def test_the_end_for_committed_readers_is_the_last_stable_offset(client: WireClient, batch: Build) -> None:
    _log(client).append(batch([(b"k", b"v")]), 0)
    _log(client).append(batch([(b"k", b"v")], 1, 0, 0, True, timestamps=[9_000]), 0)
    assert _offsets(client, 5, [("t", 0, -1)])["t", 0] == (Code.NONE, -1, 2)
    assert _offsets(client, 5, [("t", 0, -1)], committed=True)["t", 0] == (Code.NONE, -1, 1)
    assert _offsets(client, 5, [("t", 0, 9_000)])["t", 0] == (Code.NONE, 9_000, 1)
    assert _offsets(client, 5, [("t", 0, 9_000)], committed=True)["t", 0] == (Code.NONE, -1, -1)


@pytest.mark.parametrize("codec", [0, 1, 4])
def test_offsets_by_time_are_exact_to_the_record(client: WireClient, batch: Build, codec: int) -> None:
    times = [[100, 110, 120], [130, 90, 140], [200, 210, 205]]
    for row in times:
        _log(client).append(batch([(b"k", b"v")] * 3, timestamps=row, codec=codec), 0)
    flat = [time for row in times for time in row]
    for wanted in (0, 100, 101, 111, 125, 131, 140, 141, 200, 206, 210):
        expected = next(i for i, time in enumerate(flat) if time >= wanted)
        assert _offsets(client, 1, [("t", 0, wanted)])["t", 0] == (Code.NONE, flat[expected], expected)
    assert _offsets(client, 1, [("t", 0, 211)])["t", 0] == (Code.NONE, -1, -1)


def test_the_largest_timestamp_is_found(client: WireClient, batch: Build) -> None:
    assert _offsets(client, 5, [("t", 0, -3)])["t", 0] == (Code.NONE, -1, -1)
    for time in (100, 900, 300):
        _log(client).append(batch([(b"k", b"v")], timestamps=[time]), 0)
    assert _offsets(client, 5, [("t", 0, -3)])["t", 0] == (Code.NONE, 900, 1)


def test_times_below_the_start_are_not_told(client: WireClient, batch: Build) -> None:
    for time in (100, 200, 300):
        _log(client).append(batch([(b"k", b"v")], timestamps=[time]), 0)
    client.broker.topics.delete_records("t", 0, 1)
    assert _offsets(client, 1, [("t", 0, 50)])["t", 0] == (Code.NONE, 200, 1)


def test_virtual_time_ends_a_wait(client: WireClient) -> None:
    def write(out: Writer) -> None:
        _write(out, 11, [("t", 0, 0)], most=1 << 20, each=1 << 20, committed=False, wait=250, least=1)

    client.broker.tick(Times(100.0, 0))
    client.send(Api.FETCH, 11, write)
    assert client.broker.waiting.next_deadline() == 100.25
