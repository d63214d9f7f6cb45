"""Fixtures for the local broker: batches as a client builds them, and storage that dies in the middle of a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from batch_maker import build_batch

from headrace.connectors.broker.settings import TopicSettings
from headrace.connectors.broker.storage import LogFile, MemoryFile, MemoryStorage


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
