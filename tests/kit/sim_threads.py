"""``threading`` in virtual time: threads are processes of the simulation that live and die with their maker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from sim_time import SimProcess, SimTime

_FOR_EVER = 1e6


class SimEvent:
    """``threading.Event``."""

    def __init__(self, time: SimTime) -> None:
        self._condition, self._set = SimCondition(time), False

    def set(self) -> None:
        """Set it."""
        self._set = True
        self._condition.notify_all()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def wait(self, seconds: float = _FOR_EVER) -> bool:
        """Wait for so long."""
        return self._condition.wait_for(self.is_set, seconds)


class SimCondition:
    """``threading.Condition``; nothing else runs while it is held, because only a wait gives up the turn."""

    def __init__(self, time: SimTime) -> None:
        self._time = time
        self._waiting: list[SimProcess] = []

    def __enter__(self) -> SimCondition:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to release."""

    def notify_all(self) -> None:
        """Let everybody look again."""
        for process in self._waiting:
            process.wake()

    def wait(self, seconds: float = _FOR_EVER) -> bool:
        """Wait for a notice; true in any case, as a spurious one may come."""
        me = self._time.me()
        self._waiting.append(me)
        try:
            me.block(seconds)
        finally:
            self._waiting.remove(me)
        return True

    def wait_for(self, ready: Callable[[], bool], seconds: float = _FOR_EVER) -> bool:
        """Wait until something is so."""
        deadline = self._time.now + seconds
        while not ready():
            if self._time.now >= deadline:
                return False
            self.wait(deadline - self._time.now)
        return True


class SimThread:
    """``threading.Thread``."""

    def __init__(
        self,
        time: SimTime,
        target: Callable[..., None],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = True,
    ) -> None:
        self._time, self._target, self._args, self._name = time, target, args, name
        self._process: SimProcess | None = None
        self._over = SimEvent(time)

    def start(self) -> None:
        """Run."""
        owner = self._time.me()
        self._process = SimProcess(self._time, f"{owner.name}.{self._name}", self._run)
        self._process.frozen_until = owner.frozen_until
        owner.children.append(self._process)

    def _run(self) -> None:
        try:
            self._target(*self._args)
        finally:
            self._over.set()

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and not self._process.ended

    def join(self, timeout: float = _FOR_EVER) -> None:
        """Wait for its end."""
        if self._process is not None:
            self._over.wait(timeout)


def sim_threading(time: SimTime) -> SimpleNamespace:
    """What stands in for the module."""
    return SimpleNamespace(
        Event=partial(SimEvent, time),
        Condition=partial(SimCondition, time),
        Thread=partial(SimThread, time),
        Lock=threading.Lock,
        current_thread=threading.current_thread,
    )
