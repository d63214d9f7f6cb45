"""Gives every Step's figures to all sinks beside training: a sink that fails or hangs is said once, and counted.

Goes in: figures by version; comes out: calls of the sinks, in order, from a thread for each. Training never waits for
a sink: what does not fit into its queue is dropped and counted (``sinks/dropped``, ``sinks/failed``).
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

from headrace.connectors.plugins import load
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.sinks.sink import RunInfo, Sink, flat_settings, required

__all__ = ("Sinks", "found_sinks", "open_sinks")

_QUEUED = 256
_CLOSE_SECONDS = 10.0


class _Line:
    """The queue and the thread of one sink."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name, self._make = name, make
        self._sink: Sink | None = None
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(_QUEUED)
        self._said: set[str] = set()
        self.failed = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue figures; never waits."""
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            self.dropped += 1
            self._say("dropped", f"has not taken {_QUEUED} versions: it hangs or is too slow, later ones are dropped")

    def _run(self) -> None:
        self._try(self._begin)
        while (entry := self._queue.get()) is not None:
            if self._sink is None:
                self.dropped += 1
            else:
                self._try(partial(self._sink.write, *entry))
        if self._sink is not None:
            self._try(self._sink.close)

    def _begin(self) -> None:
        self._sink = self._make()

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the seam to other people's clients: whatever they raise, training goes on
            self.failed += 1
            self._say("failed", f"{type(error).__name__}: {error}; training goes on, failures are counted")

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} metrics sink {self._name}: {text}\n")
            sys.stderr.flush()

    def close(self, until: float) -> None:
        """Let the sink finish what is queued; it is left alone when that takes too long."""
        while time.monotonic() < until:
            try:
                self._queue.put_nowait(None)
                break
            except queue.Full:
                time.sleep(0.05)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._say("closed", "did not finish; the last versions may be missing there")


class Sinks:
    """All sinks of a trainer; none is fine. makers: by name, what makes a sink, called in the sink's own thread."""

    def __init__(self, makers: Mapping[str, Callable[[], Sink]]) -> None:
        self._lines = [_Line(name, make) for name, make in makers.items()]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand figures of a version to every sink; returns at once."""
        for line in self._lines:
            line.put(step, metrics)

    def figures(self) -> dict[str, float]:
        """Counts so far of what sinks refused and missed; empty without sinks."""
        if not self._lines:
            return {}
        return {
            "sinks/failed": float(sum(line.failed for line in self._lines)),
            "sinks/dropped": float(sum(line.dropped for line in self._lines)),
        }

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Let all sinks finish, together no longer than this."""
        until = time.monotonic() + seconds
        for line in self._lines:
            line.close(until)


def open_sinks(config: RunConfig, policy: str) -> Sinks:
    """The sinks that ``[metrics]`` names. Raises ConfigurationError when one is unknown, lacks its package or does not
    know an option; one that cannot start for another reason (no network) is said, and training goes on without it.
    """
    info = RunInfo(
        project=config.metrics.project,
        run=config.run.id,
        policy=policy,
        folder=config.run_folder(),
        settings=flat_settings({"policy": policy, **config.trainer_of(policy).model_dump(mode="json")}),
    )
    makers: dict[str, Callable[[], Sink]] = {}
    for name, cls in found_sinks(config.metrics.sinks).items():
        options = config.metrics.options.get(name, {})
        try:
            signature(cls).bind(info, **options)
        except TypeError as error:
            raise ConfigurationError(f"metrics.options.{name}: {error}") from error
        makers[name] = partial(cls, info, **options)
    return Sinks(makers)


def found_sinks(names: Sequence[str]) -> dict[str, Any]:
    """The classes of sinks by name. Raises ConfigurationError when one is unknown, named twice or lacks its package."""
    if len(set(names)) < len(names):
        raise ConfigurationError(f"metrics.sinks names one twice: {', '.join(names)}")
    classes = {name: load("headrace.sinks", name) for name in names}
    for name, cls in classes.items():
        if getattr(cls, "package", ""):
            required(cls.package, name, name)
    return classes
