"""Generations on their way from the threads that make them to the owner that steps."""

from queue import Empty, SimpleQueue

from headrace.connectors.engines.engine import Generation

__all__ = ("Ended",)


class Ended:
    """What has ended and was not taken yet. ``put`` may be called from any thread, all else from the owner's."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Generation] = SimpleQueue()
        self._here: dict[int, Generation] = {}

    def put(self, generation: Generation) -> None:
        """Something has ended."""
        self._queue.put(generation)

    def take(self, seconds: float = 0.0) -> list[Generation]:
        """All that has ended, waiting up to ``seconds`` for the first."""
        self._collect(0.0 if self._here else seconds)
        out = list(self._here.values())
        self._here.clear()
        return out

    def pop(self, key: int) -> Generation | None:
        """One that has ended; None when it has not."""
        self._collect(0.0)
        return self._here.pop(key, None)

    def _collect(self, seconds: float) -> None:
        try:
            one = self._queue.get(timeout=seconds) if seconds else self._queue.get_nowait()
            while True:
                self._here[one.key] = one
                one = self._queue.get_nowait()
        except Empty:
            return
