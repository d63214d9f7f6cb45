"""The scripted engine as a flow: all running sequences of an engine progress at one rate, lower the more they are.

The same latency model as ``connectors/engines/scripted.py`` (one step takes ``step_seconds + row_seconds * rows`` and
gives every row a token), without a turn for each token: a sequence of n tokens ends when the engine has made n steps
since it entered. Exact up to one step.
"""

import heapq
from collections import deque
from collections.abc import Callable

from headrace.pipeline.simulation.clock import Clock

__all__ = ("FlowEngine",)


class FlowEngine:
    """One engine. slots: sequences that run at once, the others wait in order. speed: 0.3 for a machine at 30 %."""

    def __init__(
        self, clock: Clock, *, slots: int, step_seconds: float, row_seconds: float, speed: float = 1.0
    ) -> None:
        self.tokens = 0.0
        """Steps times rows so far."""
        self.busy = 0.0
        """Seconds in which at least one sequence ran."""
        self._clock = clock
        self._slots = slots
        self._step, self._row = step_seconds / speed, row_seconds / speed
        self._steps = 0.0
        self._seen = 0.0
        self._running: dict[int, Callable[[], None]] = {}
        self._ends: list[tuple[float, int]] = []
        self._waiting: deque[tuple[int, float, Callable[[], None]]] = deque()
        self._numbers = 0
        self._watch = 0
        self._paused_until = 0.0

    def add(self, tokens: float, done: Callable[[], None]) -> int:
        """Take a sequence of so many tokens; ``done`` is called when it has ended. Returns its number for ``abort``."""
        self._numbers += 1
        self._waiting.append((self._numbers, tokens, done))
        self._fill()
        return self._numbers

    def abort(self, number: int) -> None:
        """Drop a sequence; unknown and ended ones are ignored."""
        self._advance()
        if self._running.pop(number, None) is None:
            self._waiting = deque(entry for entry in self._waiting if entry[0] != number)
        self._fill()

    def pause(self, seconds: float) -> None:
        """Stand still for a while, as for an update of weights."""
        self._advance()
        self._paused_until = max(self._paused_until, self._clock.now + seconds)
        self._expect()

    def _advance(self) -> None:
        """Account for the time since the last change."""
        now, rows = self._clock.now, len(self._running)
        started = max(self._seen, min(now, self._paused_until))
        if rows and now > started:
            steps = (now - started) / (self._step + self._row * rows)
            self._steps += steps
            self.tokens += steps * rows
            self.busy += now - started
        self._seen = now

    def _fill(self) -> None:
        self._advance()
        while self._waiting and len(self._running) < self._slots:
            number, tokens, done = self._waiting.popleft()
            self._running[number] = done
            heapq.heappush(self._ends, (self._steps + tokens, number))
        self._expect()

    def _expect(self) -> None:
        """Wake up when the first of the running ones ends, if nothing changes before."""
        self._watch += 1
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if self._ends:
            rate = self._step + self._row * len(self._running)
            wait = max(0.0, self._paused_until - self._clock.now) + (self._ends[0][0] - self._steps) * rate
            watch = self._watch
            self._clock.after(wait, lambda: self._wake(watch))

    def _wake(self, watch: int) -> None:
        if watch != self._watch:
            return
        self._advance()
        ended = []
        while self._ends and self._ends[0][0] <= self._steps + 1e-9 * (1 + self._steps):
            done = self._running.pop(heapq.heappop(self._ends)[1], None)
            if done is not None:
                ended.append(done)
        self._fill()
        for done in ended:
            done()
