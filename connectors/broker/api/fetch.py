"""Fetch: reading logs, at once or when there is something to read.

Batches go out as they lie in the files; large pieces by reference, so that the shell can send them from the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from headrace.connectors.broker.api.call import Call, Later
from headrace.connectors.broker.codes import Code
from headrace.connectors.broker.fetching import WaitingFetch
from headrace.connectors.broker.log import PartitionLog
from headrace.connectors.broker.storage import FileSlice
from headrace.connectors.broker.wire import Body, Reader

_READ_COMMITTED = 1
_SMALL = 1 << 16
"""Slices up to this size are copied into the response: cheaper than one more system call for each."""

_WANTED_V4 = struct.Struct(">iqi")
_WANTED_V5 = struct.Struct(">iqqi")
_WANTED_V9 = struct.Struct(">iiqqi")
_PART = struct.Struct(">ihqq")


class Wanted(NamedTuple):
    """One partition of a fetch."""

    partition: int
    offset: int
    max_bytes: int
    log: PartitionLog | None


class FetchRequest(NamedTuple):
    """A fetch as the client sent it; times in milliseconds."""

    version: int
    wait_ms: int
    min_bytes: int
    max_bytes: int
    committed_only: bool
    topics: list[tuple[str, list[Wanted]]]

    def partitions(self) -> Iterator[Wanted]:
        """All partitions of all topics, in order."""
        for _, wanted in self.topics:
            yield from wanted


def fetch(call: Call) -> Body | Later:
    """Versions 4 to 11 (no fetch sessions): what is there, or wait until min_bytes are or max_wait is over."""
    request = _read_request(call)
    if request.wait_ms <= 0 or _is_ready(request):
        return _response(request)
    positions = {wanted.log: wanted.offset for wanted in request.partitions() if wanted.log is not None}

    def answer() -> None:
        call.reply(_response(request))

    waiting = WaitingFetch(positions, request.committed_only, lambda: _is_ready(request), answer)
    call.cancel = waiting.unpark
    if request.min_bytes <= 1:
        call.hurry = lambda: waiting.finish(force=True)
    call.broker.waiting.park(waiting, call.broker.times.now + request.wait_ms / 1000)
    return Later.PARKED


def _read_request(call: Call) -> FetchRequest:
    reader, version, log = call.reader, call.version, call.broker.topics.log
    reader.int32()
    wait_ms, min_bytes, max_bytes = reader.int32(), reader.int32(), reader.int32()
    committed_only = reader.int8() == _READ_COMMITTED
    if version >= 7:
        reader.int32()
        reader.int32()
    topics = []
    for _ in range(reader.length()):
        topic = reader.string()
        topics.append((topic, [Wanted(*fields, log(topic, fields[0])) for fields in _wanted(reader, version)]))
    return FetchRequest(version, wait_ms, min_bytes, max_bytes, committed_only, topics)


def _wanted(reader: Reader, version: int) -> Iterator[tuple[int, int, int]]:
    """(partition, offset, max bytes) of each partition of a topic."""
    count = reader.length()
    if version >= 9:
        for _ in range(count):
            partition, _, offset, _, max_bytes = reader.unpack(_WANTED_V9)
            yield partition, offset, max_bytes
    elif version >= 5:
        for _ in range(count):
            partition, offset, _, max_bytes = reader.unpack(_WANTED_V5)
            yield partition, offset, max_bytes
    else:
        for _ in range(count):
            partition, offset, max_bytes = reader.unpack(_WANTED_V4)
            yield partition, offset, max_bytes


def _is_ready(request: FetchRequest) -> bool:
    """Whether an answer need not wait: enough bytes, or an error to report."""
    found = 0
    for _, offset, max_bytes, log in request.partitions():
        if log is None or not log.start <= offset <= log.end:
            return True
        limit = log.last_stable_offset if request.committed_only else log.end
        if offset < limit:
            if request.min_bytes <= 1:
                return True
            piece = log.read(offset, max_bytes, limit, True)
            found += piece[0].size if piece is not None else 0
            if found >= request.min_bytes:
                return True
    return request.min_bytes <= 0


def _response(request: FetchRequest) -> Body:
    version = request.version
    body: Body = []
    out = bytearray(b"\0\0\0\0\0\0\0\0\0\0" if version >= 7 else b"\0\0\0\0")
    out += len(request.topics).to_bytes(4)
    left = request.max_bytes
    nothing_yet = True
    for topic, partitions in request.topics:
        name = topic.encode()
        out += len(name).to_bytes(2) + name + len(partitions).to_bytes(4)
        for partition, offset, max_bytes, log in partitions:
            if log is None:
                _part(out, version, partition, Code.UNKNOWN_TOPIC_OR_PARTITION, None, None)
            elif not log.start <= offset <= log.end:
                _part(out, version, partition, Code.OFFSET_OUT_OF_RANGE, log, None)
            else:
                limit = log.last_stable_offset if request.committed_only else log.end
                found = log.read(offset, min(max_bytes, left), limit, nothing_yet) if offset < limit else None
                aborted = None
                if request.committed_only:
                    aborted = log.aborted_between(offset, found[1]) if found is not None else []
                _part(out, version, partition, Code.NONE, log, aborted)
                if found is None:
                    out += b"\0\0\0\0"
                    continue
                nothing_yet = False
                left = max(0, left - found[0].size)
                out = _put(body, out, found[0])
                continue
            out += b"\0\0\0\0"
    body.append(out)
    return body


def _put(body: Body, out: bytearray, piece: FileSlice) -> bytearray:
    """Append the bytes of a slice, copied or by reference; returns the buffer to go on with."""
    out += piece.size.to_bytes(4)
    if piece.size <= _SMALL:
        out += piece.file.read(piece.position, piece.size)
        return out
    body.append(out)
    body.append(piece)
    return bytearray()


def _part(
    out: bytearray,
    version: int,
    partition: int,
    code: Code,
    log: PartitionLog | None,
    aborted: list[tuple[int, int]] | None,
) -> None:
    """All fields of a partition before its records."""
    end, stable, start = (log.end, log.last_stable_offset, log.start) if log is not None else (-1, -1, -1)
    out += _PART.pack(partition, code, end, stable)
    if version >= 5:
        out += start.to_bytes(8, signed=True)
    out += (-1 if aborted is None else len(aborted)).to_bytes(4, signed=True)
    for producer_id, first in aborted or ():
        out += producer_id.to_bytes(8) + first.to_bytes(8)
    if version >= 11:
        out += b"\xff\xff\xff\xff"
