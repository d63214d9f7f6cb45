"""The process in which one environment lives: an episode at a time, ended from outside when it hangs.

Goes in: pickled (what, arguments), one a frame; comes out: (value, error text) for each but ``close``. What an
environment prints goes to standard error, what it reads is empty; when the parent dies, the calls end and this process
with all that the environment started exits.
"""

import json
import queue
import sys
from typing import Any

from headrace.pipeline.environments.environment import (
    Environment,
    EnvironmentFailed,
    guarded,
    make_environment,
    observed,
)
from headrace.pipeline.rewards.child import connected, write_frame

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
        if what == "close":
            return None
        seen = observed(self._name, what, value)
        return (seen, guarded(self._name, "tools", self._tools)) if what == "reset" else seen

    def _tools(self) -> Any:
        """The tools in plain types: they are unpickled in the worker."""
        return json.loads(json.dumps(getattr(self._environment, "tools", None), default=str))


def serve() -> None:
    """Answer calls until they end."""
    calls: queue.Queue[Any] = queue.Queue()
    out = connected(calls)
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
