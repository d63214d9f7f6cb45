"""Fixtures for the local broker: batches as a client builds them, and storage that dies in the middle of a write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace.connectors.broker import batches
from headrace.connectors.broker.batches import Header, Record
from headrace.connectors.broker.settings import TopicSettings
from headrace.connectors.broker.storage import LogFile, MemoryFile, MemoryStorage

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
) -> bytearray:
    """A batch of (key, value) records; times default to 1000, 1001, ..."""
    times = list(timestamps) if timestamps is not None else [1000 + i for i in range(len(pairs))]
    attributes = codec | (16 if transactional else 0)
    header = Header(0, 0, -1, 2, 0, attributes, len(pairs) - 1, times[0], 0, producer, epoch, sequence, len(pairs))
    rows = [
        Record(i, times[i], key, value is not None, _field(key) + _field(value) + b"\0")
        for i, (key, value) in enumerate(pairs)
    ]
    return batches.rebuilt(header, rows)


class Killed(BaseException):
    """The process died in the middle of a write."""


class KillableStorage(MemoryStorage):
    """Memory that outlives the broker; the write number `kill_at` is torn after half of its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.kill_at: int | None = None

    def open(self, name: str) -> LogFile:
        """A file that counts writes."""
        if name not in self.files:
            self.files[name] = KillableFile(self)
        return self.files[name]


class KillableFile(MemoryFile):
    """A file of `KillableStorage`."""

    def __init__(self, storage: KillableStorage) -> None:
        super().__init__()
        self._storage = storage

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Write, or tear the write and die."""
        self._storage.writes += 1
        if self._storage.writes == self._storage.kill_at:
            self.data += bytes(data)[: len(data) // 2]
            raise Killed
        super().append(data)


@pytest.fixture
def batch() -> Callable[..., bytearray]:
    """Builds a batch, see `build_batch`."""
    return build_batch


@pytest.fixture
def settings() -> Callable[..., TopicSettings]:
    """Topic settings from names with underscores."""

    def make(**given: Any) -> TopicSettings:
        return TopicSettings.of({name.replace("_", "."): str(value) for name, value in given.items()})

    return make


@pytest.fixture
def killable() -> KillableStorage:
    """Storage that can be killed."""
    return KillableStorage()


@pytest.fixture
def killed() -> type[Killed]:
    """What a killed process raises."""
    return Killed


@pytest.fixture
def memory() -> MemoryStorage:
    """Plain memory."""
    return MemoryStorage()
