"""Timers of a task, persisted as entries of its store: they survive a restart and commit with everything else.

Each timer has the time it was armed for and the time it is due; an outage moves the second, never the first, because
time without a broker does not count towards a timer (protocol 7). Firing waits for the caller, who first makes sure
that the inputs were read far enough.
"""

import heapq
import struct
from collections.abc import Callable

from headrace.pipeline.runtime.store import OverlayStore

__all__ = ("TIMER_PREFIX", "Timers")

TIMER_PREFIX = b"t"
"""First byte of the store keys that hold timers."""
_ENTRY = struct.Struct("<qq")
_SPARE = 256


class Timers:
    """Timers by key over a store; all times in milliseconds since the epoch."""

    def __init__(self, store: OverlayStore) -> None:
        self._store = store
        self._armed: dict[str, tuple[int, int]] = {}
        self._heap: list[tuple[int, str]] = []
        self._undo: list[tuple[str, tuple[int, int] | None]] = []
        self.mark: Callable[[], None] = self._undo.clear
        """Start a call whose changes ``undo`` takes back."""
        self.reload()

    def __len__(self) -> int:
        return len(self._armed)

    def reload(self) -> None:
        """Take the timers from the store again (after a restore or an abort)."""
        self._armed = {
            key[1:].decode(): (entry[0], entry[1])
            for key, value in self._store.scan(TIMER_PREFIX)
            if (entry := _ENTRY.unpack(value))
        }
        self._rebuild()
        self._undo.clear()

    def arm(self, key: str, at_ms: int) -> None:
        """Set or move a timer."""
        self._set(key, (at_ms, at_ms))

    def disarm(self, key: str) -> None:
        """Remove a timer; an unknown key is ignored."""
        if key in self._armed:
            self._undo.append((key, self._armed.pop(key)))
            self._store.delete(TIMER_PREFIX + key.encode())
            if len(self._heap) > _SPARE + 4 * len(self._armed):  # else what is disarmed stays until it would be due
                self._rebuild()

    def next_due_ms(self) -> int | None:
        """When the first timer is due, None without timers."""
        heap = self._heap
        while heap and self._due_of(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now_ms: int) -> tuple[str, int] | None:
        """Disarm the first timer that is due; returns its key and the time it was armed for, None if none is due."""
        due = self.next_due_ms()
        if due is None or due > now_ms:
            return None
        key = heapq.heappop(self._heap)[1]
        at = self._armed[key][0]
        self.disarm(key)
        return key, at

    def shift(self, start_ms: int, end_ms: int) -> int:
        """Give back the time from ``start_ms`` to ``end_ms`` to every timer that was not due at its start.

        Returns how many were moved.
        """
        moved = [(key, at, due) for key, (at, due) in self._armed.items() if due >= start_ms]
        for key, at, due in moved:
            self._set(key, (at, due + end_ms - start_ms))
        return len(moved)

    def undo(self) -> None:
        """Take back every change since ``mark``; the store's own entries are undone by the store."""
        if not self._undo:
            return
        for key, before in reversed(self._undo):
            if before is None:
                self._armed.pop(key, None)
            else:
                self._armed[key] = before
        self._undo.clear()
        self._rebuild()

    def _set(self, key: str, entry: tuple[int, int]) -> None:
        before = self._armed.get(key)
        if before == entry:
            return
        self._undo.append((key, before))
        self._armed[key] = entry
        self._store.put(TIMER_PREFIX + key.encode(), _ENTRY.pack(*entry))
        heapq.heappush(self._heap, (entry[1], key))

    def _due_of(self, key: str) -> int | None:
        entry = self._armed.get(key)
        return None if entry is None else entry[1]

    def _rebuild(self) -> None:
        self._heap = [(due, key) for key, (_, due) in self._armed.items()]
        heapq.heapify(self._heap)
