"""Requests in bytes, responses in bytes, without a socket and in virtual time."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from headrace.connectors.broker.api.call import Call
from headrace.connectors.broker.api.table import TABLE
from headrace.connectors.broker.broker import Broker, BrokerOptions, Times
from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.dispatch import dispatch
from headrace.connectors.broker.storage import FileSlice, MemoryStorage
from headrace.connectors.broker.wire import Body, MalformedRequest, Reader, Writer

Build = Callable[..., bytearray]


class Wire:
    """A client without a socket: `answers` collects the bodies of responses."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.answers: list[Reader] = []

    def _received(self, body: Body) -> None:
        data = b"".join(p.file.read(p.position, p.size) if isinstance(p, FileSlice) else bytes(p) for p in body)
        assert int.from_bytes(data[:4]) == len(data) - 4
        self.answers.append(Reader(memoryview(data), position=8))

    def send(self, api: int, version: int, write: Callable[[Writer], None] | None = None) -> Call | None:
        """Hand over one request; returns the call when its response is owed."""
        out = Writer()
        for value in (api, version):
            out.int16(value)
        out.int32(7)
        out.string("test")
        out.flexible = api in TABLE and version >= TABLE[api].flexible
        out.tags()
        if write is not None:
            write(out)
        return dispatch(self.broker, memoryview(out.buffer), self._received)


@pytest.fixture
def wire(memory: MemoryStorage) -> Wire:
    """A client of a broker with one topic."""
    broker = Broker(memory, BrokerOptions(auto_create=False), Times(0.0, 0))
    broker.topics.create("t", 1, {})
    return Wire(broker)


def _fetch(out: Writer, offset: int, wait_ms: int, min_bytes: int = 1, committed: bool = False) -> None:
    out.int32(-1)
    out.int32(wait_ms)
    out.int32(min_bytes)
    out.int32(1 << 20)
    out.int8(committed)
    out.int32(0)
    out.int32(-1)
    out.length(1)
    out.string("t")
    out.length(1)
    out.int32(0)
    out.int32(-1)
    out.int64(offset)
    out.int64(-1)
    out.int32(1 << 20)
    out.length(0)
    out.string("")


def _fetched(reader: Reader) -> tuple[Code, int, int]:
    """(code, end offset, bytes of records) of a fetch response."""
    reader.position += 4 + 2 + 4 + 4
    reader.string()
    reader.int32()
    reader.int32()
    code, end = Code(reader.int16()), reader.int64()
    reader.position += 16
    aborted = reader.int32()
    reader.position += 16 * max(0, aborted)
    reader.int32()
    return code, end, reader.int32()


def _append(wire: Wire, batch: bytearray) -> None:
    log = wire.broker.topics.log("t", 0)
    assert log is not None
    log.append(batch, 0)


def test_a_parked_fetch_is_answered_by_an_append(wire: Wire, batch: Build) -> None:
    assert wire.send(Api.FETCH, 11, lambda out: _fetch(out, 0, 500)) is not None
    assert wire.answers == []
    _append(wire, batch([(b"k", b"v")]))
    wire.broker.waiting.answer_marked()
    code, end, size = _fetched(wire.answers[0])
    assert (code, end) == (Code.NONE, 1) and size > 61
    _append(wire, batch([(b"k", b"v")]))
    wire.broker.waiting.answer_marked()
    assert len(wire.answers) == 1


def test_a_parked_fetch_is_answered_empty_when_its_time_is_up(wire: Wire) -> None:
    wire.send(Api.FETCH, 11, lambda out: _fetch(out, 0, 500))
    assert wire.broker.waiting.next_deadline() == 0.5
    wire.broker.waiting.expire(0.4)
    assert wire.answers == []
    wire.broker.waiting.expire(0.5)
    assert _fetched(wire.answers[0]) == (Code.NONE, 0, 0)
    assert wire.broker.waiting.next_deadline() is None


def test_min_bytes_hold_an_answer_back(wire: Wire, batch: Build) -> None:
    wire.send(Api.FETCH, 11, lambda out: _fetch(out, 0, 500, min_bytes=150))
    for expected in (0, 1):
        _append(wire, batch([(b"k", b"v" * 20)]))
        wire.broker.waiting.answer_marked()
        assert len(wire.answers) == expected


def test_a_committed_reader_wakes_at_the_end_of_the_transaction(wire: Wire, batch: Build) -> None:
    wire.send(Api.FETCH, 11, lambda out: _fetch(out, 0, 500, committed=True))
    _append(wire, batch([(b"k", b"v")], 5, 0, 0, True))
    wire.broker.waiting.answer_marked()
    assert wire.answers == []
    wire.broker.write_marker(("t", 0), 5, 0, True)
    wire.broker.waiting.answer_marked()
    assert _fetched(wire.answers[0])[:2] == (Code.NONE, 2)


def test_a_client_that_goes_away_leaves_no_fetch_behind(wire: Wire, batch: Build) -> None:
    call = wire.send(Api.FETCH, 11, lambda out: _fetch(out, 0, 500))
    assert call is not None and call.cancel is not None
    call.cancel()
    _append(wire, batch([(b"k", b"v")]))
    wire.broker.waiting.answer_marked()
    wire.broker.waiting.expire(10.0)
    log = wire.broker.topics.log("t", 0)
    assert wire.answers == [] and log is not None and log.watchers == set()


def test_an_offset_out_of_range_is_answered_at_once(wire: Wire) -> None:
    wire.send(Api.FETCH, 11, lambda out: _fetch(out, 5, 500))
    assert _fetched(wire.answers[0])[0] is Code.OFFSET_OUT_OF_RANGE


def test_topics_are_not_created_by_asking_where_that_is_off(wire: Wire) -> None:
    def ask(out: Writer) -> None:
        out.array(["fresh"], out.string)
        out.int8(1)
        out.int8(0)
        out.int8(0)

    wire.send(Api.METADATA, 8, ask)
    assert "fresh" not in wire.broker.topics


def test_the_table_is_told_in_every_version_that_asks_for_it(wire: Wire) -> None:
    for version in range(4):
        wire.send(Api.API_VERSIONS, version, lambda out: out.tags())
        reader = wire.answers[-1]
        reader.flexible = version >= 3
        assert reader.int16() == Code.NONE
        assert reader.length() == len(TABLE)


@pytest.mark.parametrize("request_key", [(99, 0), (Api.PRODUCE, 2), (Api.FETCH, 12)])
def test_what_is_not_served_ends_the_connection(wire: Wire, request_key: tuple[int, int]) -> None:
    with pytest.raises(MalformedRequest):
        wire.send(*request_key)


@pytest.mark.parametrize("api", sorted(TABLE))
def test_a_request_cut_anywhere_is_malformed_and_changes_nothing(wire: Wire, api: int) -> None:
    """Whatever a broken client sends, the server can tell it from a fault of its own."""
    for version in range(TABLE[api].low, TABLE[api].high + 1):
        for size in (0, 1, 3, 9):
            data = struct.pack(">hhih", api, version, 1, -1) + b"\0" * (version >= TABLE[api].flexible) + b"\x7f" * size
            try:
                dispatch(wire.broker, memoryview(bytearray(data)), lambda body: None)
            except (MalformedRequest, struct.error, IndexError, UnicodeDecodeError):
                continue
    assert wire.broker.topics.names() == ["t"]
