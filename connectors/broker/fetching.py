"""Fetches that wait for data: which of them an append, a commit or the passing of time has made answerable.

A waiting fetch watches the logs it asked for. A change marks it; marked fetches are answered together after the
requests at hand are done, so a transaction that ends in many partitions wakes a reader once, and no change makes
anybody scan partitions that did not change.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

from headrace.connectors.broker.log import PartitionLog


class WaitingFetch:
    """One parked fetch: `positions` maps each log to the offset wanted; `answer` is called exactly once."""

    def __init__(
        self,
        positions: dict[PartitionLog, int],
        committed_only: bool,
        enough: Callable[[], bool],
        answer: Callable[[], None],
    ) -> None:
        self._positions = positions
        self._committed_only = committed_only
        self._enough = enough
        self._answer = answer
        self._queue: WaitingFetches | None = None
        self.done = False

    def changed(self, log: PartitionLog) -> None:
        """A watched log changed: queue for an answer if there is something to read."""
        limit = log.last_stable_offset if self._committed_only else log.end
        if limit != self._positions[log] and self._queue is not None:
            self._queue.mark(self)

    def park(self, queue: WaitingFetches) -> None:
        """Start to watch."""
        self._queue = queue
        for log in self._positions:
            log.watchers.add(self)

    def unpark(self) -> None:
        """Stop to watch, without an answer."""
        self.done = True
        self._queue = None
        for log in self._positions:
            log.watchers.discard(self)

    def finish(self, force: bool) -> None:
        """Answer if there is enough data, or in any case with `force`."""
        if not self.done and (force or self._enough()):
            self.unpark()
            self._answer()


class WaitingFetches:
    """All parked fetches by deadline (monotonic seconds), and those marked as answerable."""

    def __init__(self) -> None:
        self._deadlines: list[tuple[float, int, WaitingFetch]] = []
        self._numbers = itertools.count()
        self._marked: dict[WaitingFetch, None] = {}

    def park(self, fetch: WaitingFetch, deadline: float) -> None:
        """Let a fetch wait until `deadline`."""
        fetch.park(self)
        heapq.heappush(self._deadlines, (deadline, next(self._numbers), fetch))

    def mark(self, fetch: WaitingFetch) -> None:
        """Have a fetch looked at by the next `answer_marked`."""
        self._marked[fetch] = None

    def answer_marked(self) -> None:
        """Answer the marked fetches that have enough to read."""
        while self._marked:
            marked: Iterable[WaitingFetch] = list(self._marked)
            self._marked = {}
            for fetch in marked:
                fetch.finish(force=False)

    def next_deadline(self) -> float | None:
        """When the next parked fetch must be answered, None when none is parked."""
        while self._deadlines and self._deadlines[0][2].done:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> None:
        """Answer fetches whose time is up."""
        while self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] <= now):
            heapq.heappop(self._deadlines)[2].finish(force=True)
