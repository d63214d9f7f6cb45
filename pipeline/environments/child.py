"""The process in which one environment lives: an episode at a time, ended from outside when it hangs.

Goes in: pickled (what, arguments), one a frame; comes out: (value, error text) for each but ``close``. What an
environment prints goes to standard error; when the parent dies, standard input closes and this process exits.
"""

import os
import queue
import sys
import threading
from typing import Any

from headrace.pipeline.environments.environment import (
    Environment,
    EnvironmentFailed,
    Observation,
    guarded,
    make_environment,
)
from headrace.pipeline.rewards.child import feed, write_frame

__all__ = ("serve",)


class _Held:
    """The environment of this process, made by the first call."""

    def __init__(self) -> None:
        self._name = ""
        self._environment: Environment | None = None

    def answer(self, what: str, arguments: tuple[Any, ...]) -> Any:
        """Do one call. Raises EnvironmentFailed."""
        if what == "make":
            self._name = str(arguments[0])
            self._environment = guarded(self._name, what, make_environment, *arguments)
            return None
        value = guarded(self._name, what, getattr(self._environment, what), *arguments)
        if what != "close" and not isinstance(value, Observation):
            raise EnvironmentFailed(f"environment {self._name}: {what} returned {value!r:.100}, no Observation")
        return (value, getattr(self._environment, "tools", None)) if what == "reset" else value


def serve() -> None:
    """Answer calls until standard input closes."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    calls: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=feed, args=(calls,), name="calls", daemon=True).start()
    held = _Held()
    while True:
        what, arguments = calls.get()
        try:
            result = (held.answer(what, arguments), "")
        except EnvironmentFailed as error:
            result = (None, str(error))
        if what != "close":
            write_frame(out, result)
        elif result[1]:
            sys.stderr.write(f"{result[1]}\n")


if __name__ == "__main__":
    serve()
