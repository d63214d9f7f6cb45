"""Waiting for an object store that is away: calls are repeated with growing pauses until it answers."""

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.store import StoreUnavailable
from headrace.trainers.lanes import Stopped

__all__ = ("patiently",)

T = TypeVar("T")
_LONGEST_PAUSE = 5.0


def patiently(call: Callable[[], T], stop: StopSignal) -> T:
    """What ``call`` returns, repeated while it raises StoreUnavailable. Raises Stopped."""
    pause = 0.1
    while True:
        try:
            return call()
        except StoreUnavailable as error:
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} waiting for the object store: {error}\n")
            if stop.wait(pause):
                raise Stopped(f"stopping: {stop.reason}") from error
            pause = min(_LONGEST_PAUSE, pause * 2)
