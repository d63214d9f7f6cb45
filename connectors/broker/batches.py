"""Record batches (message format 2): header, control batches, and the records inside.

The broker reads headers of everything and rewrites only two fields that no checksum covers (base offset and leader
epoch). Records are decoded for three purposes alone: compaction, search by time, and the check that a compacted topic
gets keys.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import zstandard

from headrace.connectors.broker.crc32c import crc32c

LAYOUT = struct.Struct(">qiibIhiqqqhii")
HEADER_SIZE = LAYOUT.size
PREFIX_SIZE = 12
"""Bytes before those that the length field counts."""
_CRC_END = 21
_COMPRESSION, _APPEND_TIME, _TRANSACTIONAL, _CONTROL = 7, 8, 16, 32
_GZIP, _ZSTD = 1, 4
_LARGEST_INFLATED = 1 << 30


class Header(NamedTuple):
    """The 61 bytes in front of every batch, in wire order."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return self.length + PREFIX_SIZE

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return self.base_offset + self.last_delta

    @property
    def is_control(self) -> bool:
        """Whether this is a transaction marker."""
        return bool(self.attributes & _CONTROL)

    @property
    def is_transactional(self) -> bool:
        """Whether the batch, or the marker, belongs to a transaction."""
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def codec(self) -> int:
        """0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd."""
        return self.attributes & _COMPRESSION


class Record(NamedTuple):
    """One record; `body` is all that follows timestamp and offset (key, value, headers), as it was stored."""

    offset: int
    timestamp: int
    key: bytes | None
    has_value: bool
    body: bytes


def read_header(data: bytes | bytearray | memoryview, position: int = 0) -> Header:
    """The header at `position`; raises `struct.error` when less than a header is left."""
    return Header._make(LAYOUT.unpack_from(data, position))


def place(batch: bytearray | memoryview, base_offset: int) -> None:
    """Give a batch its offset in the log, in place."""
    struct.pack_into(">q", batch, 0, base_offset)
    struct.pack_into(">i", batch, 12, 0)


def checksum_matches(batch: bytes | bytearray | memoryview, header: Header) -> bool:
    """Whether the stored checksum is that of the content."""
    return crc32c(memoryview(batch)[_CRC_END : header.size]) == header.crc


def _seal(header: Header, records: bytes) -> bytearray:
    """A batch of this header, with length and checksum made to fit."""
    batch = bytearray(LAYOUT.pack(*header._replace(length=HEADER_SIZE - PREFIX_SIZE + len(records))))
    batch += records
    struct.pack_into(">I", batch, _CRC_END - 4, crc32c(memoryview(batch)[_CRC_END:]))
    return batch


def control_batch(producer_id: int, producer_epoch: int, commit: bool, now_ms: int) -> bytearray:
    """The marker that ends a transaction in one partition (KIP-98)."""
    key = struct.pack(">hh", 0, 1 if commit else 0)
    value = struct.pack(">hi", 0, 0)
    content = b"\0\0\0" + _signed(len(key)) + key + _signed(len(value)) + value + b"\0"
    header = Header(0, 0, 0, 2, 0, _TRANSACTIONAL | _CONTROL, 0, now_ms, now_ms, producer_id, producer_epoch, -1, 1)
    return _seal(header, _signed(len(content)) + content)


def marker_commits(batch: bytes | memoryview) -> bool:
    """Whether a control batch says commit (else abort)."""
    return batch[HEADER_SIZE + 1 + 3 + 1 + 3] == 1


def _signed(value: int) -> bytes:
    """Zigzag base-128."""
    rest = (value << 1) ^ (value >> 63)
    out = bytearray()
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def _read_signed(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return (value >> 1) ^ -(value & 1), position
        shift += 7


def inflated(batch: bytes | bytearray | memoryview, header: Header) -> bytes | None:
    """The records of a batch, uncompressed; None for the codecs not read here (snappy, lz4).

    Raises `ValueError` when the compressed bytes are damaged.
    """
    content = bytes(memoryview(batch)[HEADER_SIZE : header.size])
    try:
        if header.codec == 0:
            return content
        if header.codec == _GZIP:
            return zlib.decompress(content, wbits=31)
        if header.codec == _ZSTD:
            with zstandard.ZstdDecompressor().stream_reader(content) as stream:
                return bytes(stream.read(_LARGEST_INFLATED))
    except (zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"compressed records cannot be read: {error}") from error
    return None


def records(content: bytes, header: Header) -> Iterator[Record]:
    """The records of uncompressed `content`; raises `IndexError` or `ValueError` when it is damaged."""
    position = 0
    for _ in range(header.record_count):
        size, position = _read_signed(content, position)
        end = position + size
        if size < 0 or end > len(content):
            raise ValueError("a record passes the end of its batch")
        timestamp, position = _read_signed(content, position + 1)
        offset, start = _read_signed(content, position)
        key_size, position = _read_signed(content, start)
        key = None if key_size < 0 else content[position : position + key_size]
        value_size, _ = _read_signed(content, position + max(key_size, 0))
        body = content[start:end]
        yield Record(header.base_offset + offset, header.base_timestamp + timestamp, key, value_size >= 0, body)
        position = end


def rebuilt(header: Header, kept: Iterable[Record]) -> bytearray:
    """The batch with only the `kept` records: same offsets, times and producer, compressed as it was.

    The last offset stays that of the old header, so that offsets a reader may hold stay inside the batch. The codec
    must be one that `inflated` reads; a batch without records is not compressed and keeps its largest timestamp.
    """
    content = bytearray()
    count = 0
    newest = -1
    for record in kept:
        timestamp = _signed(record.timestamp - header.base_timestamp)
        offset = _signed(record.offset - header.base_offset)
        content += _signed(1 + len(timestamp) + len(offset) + len(record.body))
        content += b"\0" + timestamp + offset + record.body
        newest = max(newest, record.timestamp)
        count += 1
    if not count:
        return _seal(header._replace(attributes=header.attributes & ~_COMPRESSION, record_count=0), b"")
    packed = bytes(content)
    if header.codec == _GZIP:
        compressor = zlib.compressobj(wbits=31)
        packed = compressor.compress(packed) + compressor.flush()
    elif header.codec == _ZSTD:
        packed = zstandard.ZstdCompressor(level=1).compress(packed)
    return _seal(header._replace(max_timestamp=newest, record_count=count), packed)
