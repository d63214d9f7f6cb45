"""Virtual time for real code: processes that are threads of which exactly one runs at any moment, and a heap of events.

A process gives up its turn only where it would block (``SimProcess.block``), so a run depends on nothing but its seed.
It can be killed at any such place (``kill``, or at its n-th step), which unwinds its thread while every client call
that it still makes fails, and it can be frozen. ``virtual_time`` puts the clock in the place of ``time`` in modules.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time as real_time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from headrace.connectors.lifetime import StopSignal
from headrace.connectors.transaction import Watchdog


class Killed(BaseException):
    """Ends the thread of a process that was killed; no seam for errors may catch it."""


class SimTime:
    """The clock, the events and the processes of one simulation; also stands in for the module ``time``."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self.now = 1000.0
        """Monotonic seconds."""
        self.current: SimProcess | None = None
        """The process whose code runs; None in events."""
        self.processes: list[SimProcess] = []
        self.failure: BaseException | None = None
        self._start_ms = start_ms
        self._events: list[tuple[float, int, SimProcess | None, int, Callable[[], None] | None]] = []
        self._numbers = itertools.count()
        self._main = threading.Lock()
        self._main.acquire()
        self._until: Callable[[], bool] = lambda: True
        self._end = 0.0

    # what modules call

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    perf_counter = monotonic
    thread_time = process_time = staticmethod(real_time.thread_time)
    localtime, gmtime = staticmethod(real_time.localtime), staticmethod(real_time.gmtime)

    def time_ns(self) -> int:
        """Wall-clock nanoseconds."""
        return self.wall_ms() * 1_000_000

    def time(self) -> float:
        """Wall-clock seconds."""
        return self.wall_ms() / 1000

    def sleep(self, seconds: float) -> None:
        """Let time pass for the process that calls."""
        self.me().block(seconds)

    @staticmethod
    def strftime(form: str) -> str:
        """Time of day for log lines; the real one will do."""
        return real_time.strftime(form)

    # for the kit

    def wall_ms(self) -> int:
        """Wall-clock milliseconds."""
        return self._start_ms + round((self.now - 1000.0) * 1000)

    def me(self) -> SimProcess:
        """The process whose code runs."""
        assert self.current is not None, "only a process may wait"
        assert self.current.thread is threading.current_thread(), "a helper thread must not wait in virtual time"
        return self.current

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now + max(0.0, seconds), next(self._numbers), None, 0, what))

    def resume_at(self, seconds: float, process: SimProcess) -> None:
        """Let a process go on later, unless it goes on before."""
        entry = (self.now + max(0.0, seconds), next(self._numbers), process, process.ticket, None)
        heapq.heappush(self._events, entry)

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Let time pass until the condition holds (True), nothing happens any more, or the time is up."""
        self._until, self._end = until, self.now + seconds
        self._loop(None)
        if self.failure is not None:
            raise self.failure
        return until()

    def close(self) -> None:
        """Kill every process, so that no thread is left."""
        for process in self.processes:
            process.kill()
        self._until, self._end = lambda: all(p.ended for p in self.processes), self.now + 1e9
        self._loop(None)
        for process in self.processes:
            process.thread.join(10.0)
            assert not process.thread.is_alive(), f"{process.name} does not end"

    def _loop(self, me: SimProcess | None) -> None:
        """Work off events until it is the turn of ``me`` (None: of the test)."""
        self.current = None
        while True:
            try:
                over = self.failure is not None or self._until() or not self._events or self._events[0][0] > self._end
                if over:
                    self._hand_to(None, me)
                    return
                when, _, process, ticket, what = heapq.heappop(self._events)
                self.now = max(self.now, when)
                if what is not None:
                    what()
            except BaseException as error:  # the seam between the kit and the test: it is raised where the test waits
                self.failure = error
                continue
            if process is not None and process.may_run(ticket):
                self._hand_to(process, me)
                return

    def _hand_to(self, process: SimProcess | None, me: SimProcess | None) -> None:
        self.current = process
        if process is not me:
            (self._main if process is None else process.go).release()
            if me is None or not me.ended:
                (self._main if me is None else me.go).acquire()

    def ended(self, process: SimProcess) -> None:
        """The thread of a process is over; it passes the turn on."""
        self._loop(process)


class SimProcess:
    """One process. ``main`` runs in its thread; ``done`` is told what it raised (None for nothing, Killed)."""

    def __init__(
        self,
        time: SimTime,
        name: str,
        main: Callable[[], None],
        done: Callable[[BaseException | None], None] = lambda _: None,
    ) -> None:
        self.time, self.name = time, name
        self.killed = self.ended = False
        self.frozen_until = 0.0
        self.was_frozen = False
        self.ticket = 0
        self.steps = 0
        """Client calls so far, each counted before and after its effect."""
        self.kill_at = -1
        """The step at which it dies."""
        self.freeze_at: tuple[int, float] | None = None
        """The step at which it is frozen, and for how many seconds."""
        self.error: BaseException | None = None
        self.children: list[SimProcess] = []
        """Its threads: they die and stand still with it."""
        self.go = threading.Lock()
        self.go.acquire()
        self._main, self._done = main, done
        self.thread = threading.Thread(target=self._body, name=name, daemon=True)
        time.processes.append(self)
        self.thread.start()
        time.resume_at(0.0, self)

    def _body(self) -> None:
        self.go.acquire()
        try:
            if not self.killed:
                self._main()
        except BaseException as error:  # whatever ends a process is told to whoever started it
            self.error = error
        self.ended = True
        self._end_children()
        self.time.at(0.0, lambda: self._done(self.error))
        self.time.ended(self)

    def may_run(self, ticket: int) -> bool:
        """Whether an event may let it go on now; a frozen one goes on when it thaws."""
        if self.ended or ticket != self.ticket:
            return False
        if self.time.now < self.frozen_until and not self.killed:
            self.time.resume_at(self.frozen_until - self.time.now, self)
            return False
        return True

    def block(self, seconds: float | None = None) -> None:
        """Give up the turn for so long, or until ``wake``. Raises Killed."""
        assert self.time.current is self, "a process waits for itself only"
        self.check()
        self.ticket += 1
        if seconds is not None:
            self.time.resume_at(seconds, self)
        self.time._loop(self)
        self.ticket += 1
        self.check()

    def wait_for(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so; whoever makes it so calls ``wake``."""
        deadline = self.time.now + seconds
        while not ready():
            if self.time.now >= deadline:
                return False
            self.block(deadline - self.time.now)
        return True

    def wake(self) -> None:
        """Let it look again."""
        if not self.ended:
            self.time.resume_at(0.0, self)

    def check(self) -> None:
        """Raise Killed once it is dead."""
        if self.killed:
            raise Killed

    def step(self) -> None:
        """A place where it may die. Raises Killed."""
        self.check()
        if self.steps == self.kill_at:
            self.killed = True
            self._end_children()
        self.steps += 1
        self.check()
        if self.freeze_at is not None and self.steps > self.freeze_at[0]:
            (_, seconds), self.freeze_at = self.freeze_at, None
            self.freeze(seconds)
            self.block(seconds)

    def kill(self) -> None:
        """kill -9."""
        if not self.ended and not self.killed:
            self.killed = True
            self.time.resume_at(0.0, self)
        self._end_children()

    def _end_children(self) -> None:
        for child in self.children:
            child.kill()

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        self.frozen_until = max(self.frozen_until, self.time.now + seconds)
        self.was_frozen = True
        for child in self.children:
            child.freeze(seconds)

    @property
    def alive(self) -> bool:
        """Neither dead nor at its end."""
        return not (self.killed or self.ended)

    @property
    def awake(self) -> bool:
        """Whether its background threads run."""
        return self.alive and self.time.now >= self.frozen_until


class SimStop(StopSignal):
    """A stop signal in virtual time."""

    def __init__(self, time: SimTime) -> None:
        super().__init__()
        self._time = time
        self._waiting: list[SimProcess] = []

    def set(self, reason: str) -> None:
        """Ask the process to stop."""
        super().set(reason)
        for process in self._waiting:
            process.wake()

    def wait(self, seconds: float) -> bool:
        """Sleep for up to ``seconds``; True when the process should stop."""
        me = self._time.me()
        self._waiting.append(me)
        me.wait_for(self.is_set, seconds)
        self._waiting.remove(me)
        return self.is_set()


class SimWatchdog(Watchdog):
    """Ends nobody: a call that hangs shows as a run that does not end."""

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Nothing is timed."""
        yield


@contextmanager
def virtual_time(time: SimTime, modules: Sequence[ModuleType]) -> Iterator[None]:
    """Let modules see this clock as their ``time``."""
    before: list[tuple[ModuleType, Any]] = [(module, module.time) for module in modules]
    for module in modules:
        module.time = time  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, original in before:
            module.time = original  # type: ignore[attr-defined]
