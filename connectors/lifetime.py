"""The life of a process that a launcher started: when to stop, and how it ends.

``StopSignal`` is set by SIGTERM or SIGINT, or when standard input closes (the launcher died) if the process was started
with ``--exit-with-parent``. ``exit_with`` turns an error into a message and an exit code that a supervisor understands.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.schemas.errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_SUPERSEDED,
    ConfigurationError,
    HeadraceError,
    Stopping,
    Superseded,
)

__all__ = ("StopSignal", "exit_with")

_ORPHAN_SECONDS = 3.0
"""Time that a part has to end in order once its launcher is gone, and the broker with it (protocol 10: 5 s in all)."""


class StopSignal:
    """Says when this process should stop; safe to ask from any thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._at_once = False
        self.reason = ""

    def set(self, reason: str) -> None:
        """Ask the process to stop; the first reason stays."""
        self.reason = self.reason or reason
        self._event.set()
        if self._at_once:
            sys.stderr.write(f"stopping while it starts: {self.reason}\n")
            sys.stderr.flush()
            os._exit(EXIT_OK)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While inside, a request ends the process where it is: for imports and loading, which take seconds and which
        nothing interrupts. There must be nothing yet that has to be left in order.
        """
        self._at_once = True
        if self.is_set():
            self.set(self.reason)
        try:
            yield
        finally:
            self._at_once = False

    def is_set(self) -> bool:
        """True once the process should stop."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep for up to ``seconds``; True when the process should stop."""
        return self._event.wait(seconds)

    def listen(self, *, with_parent: bool) -> "StopSignal":
        """Install the signal handlers (main thread only) and, if asked, watch standard input for its end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _frame: self.set(signal.Signals(n).name))
        if with_parent:
            threading.Thread(target=self._watch_input, name="parent-pipe", daemon=True).start()
        return self

    def _watch_input(self) -> None:
        while os.read(0, 4096):
            pass
        self.set("the launcher's pipe closed")
        time.sleep(_ORPHAN_SECONDS)
        sys.stderr.write(f"ended {_ORPHAN_SECONDS:g} s after the launcher: something was still waited for\n")
        sys.stderr.flush()
        os._exit(EXIT_FAILURE)


def exit_with(main: Callable[[], int | None]) -> int:
    """Run ``main`` and return the exit code: 78 for configuration errors, 75 when superseded, 1 for other failures."""
    try:
        return main() or EXIT_OK
    except ConfigurationError as error:
        sys.stderr.write(f"configuration error: {error}\n")
        return EXIT_CONFIGURATION
    except Stopping as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_OK
    except Superseded as error:
        sys.stderr.write(f"superseded: {error}\n")
        return EXIT_SUPERSEDED
    except HeadraceError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return EXIT_FAILURE
    except Exception:  # the outermost seam of every process: the traceback goes to its log
        traceback.print_exc()
        return EXIT_FAILURE
