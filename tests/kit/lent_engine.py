"""An engine that a test has started, lent to a rollout worker in the test's own process: starting one takes minutes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout_rig import Rig

from headrace.connectors.engines.engine import Engine
from headrace.connectors.lifetime import StopSignal
from headrace.pipeline.task_to_trajectory import RolloutWorker

_LENT: list[Engine] = []


class _Lent:
    """The engine, which only its owner closes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        self._engine.abort_all()


def lent(model: str, **settings: Any) -> _Lent:
    """What a worker with ``rollout.engine = "lent_engine:lent"`` is given."""
    return _Lent(_LENT[-1])


@contextmanager
def worker_around(engine: Engine, rig: Rig) -> Iterator[None]:
    """The whole worker in a thread, ended in order; what it raises is raised here."""
    stop, failed = StopSignal(), list[BaseException]()
    worker = RolloutWorker(rig.config, rig.connection, "rollout-0", stop)

    def work() -> None:
        try:
            worker.run()
        except BaseException as error:  # handed to the test
            failed.append(error)

    thread = threading.Thread(target=work, name="worker")
    _LENT.append(engine)
    thread.start()
    try:
        yield
    finally:
        stop.set("the test ends")
        thread.join(60)
        _LENT.pop()
    assert not thread.is_alive(), "the worker does not end"
    if failed:
        raise failed[0]
