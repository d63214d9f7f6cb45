"""An object store in memory and in virtual time: puts take time, a process can die on the way, the store can be away.

``SimStore.seen`` is the same store for a test's own eyes: at once, always there, and it tells of every new object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from sim_time import SimTime

from headrace.connectors.stores.store import AlreadyExists, NoSuchKey, ObjectInfo, StoreUnavailable

__all__ = ("Objects", "SimStore")


class Objects:
    """What is in the store; an ``ObjectStore`` without time."""

    url = "sim://store"

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.listeners: list[Callable[[str], None]] = []

    def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        """Store an object."""
        if create_only and key in self.content:
            raise AlreadyExists(f"{key} is there")
        self.content[key] = bytes(data)
        for listener in self.listeners:
            listener(key)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """An object or a part of it."""
        if key not in self.content:
            raise NoSuchKey(key)
        return self.content[key][start or 0 : end]

    def head(self, key: str) -> ObjectInfo:
        """Its size."""
        return ObjectInfo(key, len(self.get(key)), 0.0)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects in the order of their keys."""
        return (self.head(key) for key in sorted(self.content) if key.startswith(prefix) and key > start_after)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.content.pop(key, None)

    def sweep_unfinished(self, prefix: str, before: float) -> int:
        """There is never anything unfinished."""
        return 0


class SimStore(Objects):
    """The store as processes see it."""

    def __init__(self, time: SimTime, seen: Objects, delay: Callable[[], float]) -> None:
        super().__init__()
        self.content, self.listeners, self.seen = seen.content, seen.listeners, seen
        self.down_until = 0.0
        self._time, self._delay = time, delay

    def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        """Store an object; the process may die before or after."""
        self._pass()
        super().put(key, data, create_only=create_only)
        self._pass()

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """An object or a part of it."""
        self._pass()
        return super().get(key, start, end)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects in the order of their keys."""
        self._pass()
        return super().list(prefix, start_after)

    def _pass(self) -> None:
        """The way to the store. Helper threads of a process do not wait, because its own thread waits for them."""
        process = self._time.current
        if process is not None and process.thread is threading.current_thread():
            process.step()
            process.block(self._delay())
        if self._time.now < self.down_until:
            raise StoreUnavailable("the store is away")
