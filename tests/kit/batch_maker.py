"""Record batches as a client builds them, for tests that speak the protocol themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.connectors.broker import batches
from headrace.connectors.broker.batches import Header, Record

Pair = tuple[bytes | None, bytes | None]


def _varint(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _field(value: bytes | None) -> bytes:
    return _varint(-1) if value is None else _varint(len(value)) + value


def build_batch(
    pairs: Sequence[Pair],
    producer: int = -1,
    epoch: int = -1,
    sequence: int = -1,
    transactional: bool = False,
    timestamps: Sequence[int] | None = None,
    codec: int = 0,
    headers: Sequence[tuple[bytes, bytes | None]] = (),
) -> bytearray:
    """A batch of (key, value) records, each with these headers; times default to 1000, 1001, ..."""
    times = list(timestamps) if timestamps is not None else [1000 + i for i in range(len(pairs))]
    attributes = codec | (16 if transactional else 0)
    header = Header(0, 0, -1, 2, 0, attributes, len(pairs) - 1, times[0], 0, producer, epoch, sequence, len(pairs))
    told = _varint(len(headers)) + b"".join(_field(name) + _field(value) for name, value in headers)
    rows = [
        Record(i, times[i], key, value is not None, _field(key) + _field(value) + told)
        for i, (key, value) in enumerate(pairs)
    ]
    return batches.rebuilt(header, rows)


def batch_of_now(count: int, producer: tuple[int, int], sequence: int, transactional: bool = False) -> bytearray:
    """A batch of `count` equal records with the time of now, so that no retention takes it."""
    now = [int(time.time() * 1000)] * count
    return build_batch([(b"k", b"v")] * count, *producer, sequence, transactional, timestamps=now)
