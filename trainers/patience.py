"""Waiting for an object store that is away: calls are repeated with growing pauses until it answers."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.store import StoreUnavailable
from headrace.trainers.lanes import Stopped

if TYPE_CHECKING:
    from headrace.trainers.ranks import Ranks

__all__ = ("patiently",)

T = TypeVar("T")
_LONGEST_PAUSE = 5.0


def patiently(call: Callable[[], T], stop: StopSignal, ranks: "Ranks | None" = None) -> T:
    """What ``call`` returns, repeated while it raises StoreUnavailable. Raises Stopped.

    ranks: those that make the same call together and fail together; rank 0 then decides for all of them.
    """
    pause = 0.1
    while True:
        try:
            return call()
        except StoreUnavailable as error:
            stopped = None
            if ranks is None or ranks.leads:
                sys.stderr.write(f"{time.strftime('%H:%M:%S')} waiting for the object store: {error}\n")
                stopped = stop.wait(pause)
            if ranks.broadcast(stopped) if ranks else stopped:
                raise Stopped(f"stopping: {stop.reason}") from error
            pause = min(_LONGEST_PAUSE, pause * 2)
