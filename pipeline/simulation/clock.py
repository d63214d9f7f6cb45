"""Virtual time: what is to happen when, in order; things at the same time keep the order in which they were put in."""

import heapq
import itertools
from collections.abc import Callable

__all__ = ("Clock",)


class Clock:
    """Seconds since the start of a simulation, and the events ahead. ``moved`` is told every new time."""

    def __init__(self, moved: Callable[[float], None] | None = None) -> None:
        self.now = 0.0
        self._moved = moved
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something later, at once at the earliest."""
        heapq.heappush(self._events, (self.now + max(0.0, seconds), next(self._numbers), what))

    def step(self) -> bool:
        """Let the next thing happen; False when there is nothing ahead."""
        if not self._events:
            return False
        self.now, _, what = heapq.heappop(self._events)
        if self._moved is not None:
            self._moved(self.now)
        what()
        return True
