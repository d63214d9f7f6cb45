"""Small values in a stage's store: ordered readable keys, JSON values, and records with a JSON note beside them.

Stages keep their state as many small entries, so that one record of input costs a few small writes and a restored
store gives back the whole in-memory view.
"""

import json
from collections.abc import Iterator
from typing import Any

from headrace.pipeline.runtime.stage import Received, Store
from headrace.schemas import codec
from headrace.schemas.checks import check_record
from headrace.schemas.records import Record

__all__ = (
    "key_of",
    "numbers_of",
    "pack",
    "pack_received",
    "read_json",
    "scan_json",
    "unpack",
    "unpack_received",
    "write_json",
)

_encode = json.JSONEncoder(separators=(",", ":")).encode


def key_of(kind: str, *numbers: int) -> bytes:
    """A key that sorts by its numbers (>= 0).

    >>> key_of("g", 7, 1)
    b'g/000000000007/000000000001'
    """
    return ((kind + "/%012d" * len(numbers)) % numbers).encode()


def numbers_of(key: bytes) -> tuple[int, ...]:
    """The numbers of a key made by ``key_of``."""
    return tuple(int(part) for part in key.split(b"/")[1:])


def write_json(store: Store, key: bytes, value: Any) -> None:
    """Put plain data under a key."""
    store.put(key, _encode(value).encode())


def read_json(store: Store, key: bytes) -> Any:
    """The plain data under a key, None when there is none."""
    value = store.get(key)
    return None if value is None else json.loads(value)


def scan_json(store: Store, kind: str) -> Iterator[tuple[bytes, Any]]:
    """Every key of a kind with its plain data, in key order."""
    for key, value in store.scan(f"{kind}/".encode()):
        yield key, json.loads(value)


def pack(note: Any, record: Record) -> bytes:
    """A record with plain data beside it, as one value."""
    return codec.encode_after(_encode(note).encode() + b"\n", record)


def pack_received(received: Received) -> bytes:
    """A record as it came in, behind a line that says when and from where; its bytes are kept as they are.

    Raises InvalidRecord as ``encode`` does.
    """
    where = f"{received.topic} {received.partition} {received.offset} {received.timestamp_ms}\n".encode()
    if not received.value:
        return codec.encode_after(where, received.record)
    check_record(received.record)
    return b"".join((where, received.value))


def unpack_received(value: bytes) -> Received:
    """The inverse of ``pack_received``."""
    where, _, body = value.partition(b"\n")
    topic, partition, offset, timestamp = where.decode().split(" ")
    return Received(
        topic=topic,
        partition=int(partition),
        offset=int(offset),
        timestamp_ms=int(timestamp),
        record=codec.decode(body),
    )


def unpack(value: bytes) -> tuple[Any, Record]:
    """The inverse of ``pack``: the plain data and the record."""
    note, _, body = value.partition(b"\n")
    return json.loads(note), codec.decode(body)
