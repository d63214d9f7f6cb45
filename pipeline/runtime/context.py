"""What a stage is given, over one task: its outputs are buffered per call and its writes can be taken back.

The task opens a call, the stage acts, then the task either hands the buffered outputs to the transaction or discards
the call as a whole. Records are encoded when they are emitted, so that a record that may not travel fails the call
that made it, not the transaction.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import version

from headrace.pipeline.runtime.frontier import Frontier, Place
from headrace.pipeline.runtime.stage import Metrics, Received, Store
from headrace.pipeline.runtime.store import MAX_VALUE_BYTES, OverlayStore, StoreView
from headrace.pipeline.runtime.timers import Timers
from headrace.schemas.checks import describe
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import RecordTooLarge
from headrace.schemas.records import Record

__all__ = ("STATE_PREFIX", "Output", "TaskContext")

STATE_PREFIX = b"s"
"""First byte of the store keys that belong to the stage."""


Output = tuple[str, int, bytes | None, bytes, list[tuple[str, bytes | None]]]
"""One buffered output record: topic without the run's prefix, partition, key, value, headers."""


class TaskContext:
    """The Context of one task (stage.Context)."""

    def __init__(
        self,
        *,
        config: RunConfig,
        sub_topology: str,
        partition: int,
        places: tuple[Place, ...],
        stores: Mapping[str, OverlayStore],
        timers: Timers,
        frontier: Frontier,
        metrics: Metrics,
        pause: Callable[[list[Place], bool], None],
    ) -> None:
        self.run = config.run.id
        self.config = config
        self.sub_topology = sub_topology
        self.partition = partition
        self.metrics = metrics
        self.outputs: list[Output] = []
        self.paused: set[str] = set()
        self.assigned_ms = 0
        self._now_ms = 0
        self._places = places
        self._by_topic = {topic: [p for p in places if p[0] == topic] for topic, _ in places}
        self._views = {name: StoreView(store, STATE_PREFIX) for name, store in stores.items()}
        self._timers = timers
        self._frontier = frontier
        self._pause = pause
        self._headers: dict[type, list[tuple[str, bytes | None]]] = {}

    def begin_call(self, now_ms: int) -> None:
        """Start a call: nothing is buffered, and time stands still."""
        self.outputs.clear()
        self._now_ms = now_ms

    def now(self) -> int:
        """Milliseconds since the epoch, constant within one call."""
        return self._now_ms

    def emit(
        self, topic: str, record: Record, *, partition: int, key: bytes | None = None, value: bytes | None = None
    ) -> None:
        """Buffer a record for an output topic, encoded unless ``value`` is. Raises InvalidRecord, RecordTooLarge."""
        if value is None:
            value = encode(record)
        if len(value) + len(key or b"") > MAX_VALUE_BYTES:
            raise RecordTooLarge(
                f"{describe(record)}: {len(value)} bytes for {topic}[{partition}] are over the limit of "
                f"{MAX_VALUE_BYTES}; offload arrays to the object store (rollout.offload_bytes)"
            )
        self.outputs.append((topic, partition, key, value, self._headers_of(record)))

    def _headers_of(self, record: Record) -> list[tuple[str, bytes | None]]:
        headers = self._headers.get(type(record))
        if headers is None:
            headers = self._headers[type(record)] = [*headers_of(record, self.run, _version())]
        return headers

    def store(self, name: str = "state") -> Store:
        """The task's store of that name; stores are declared in topics.STORES."""
        return self._views[name]

    def schedule(self, key: str, at_ms: int) -> None:
        """Arm (or move) a timer."""
        self._timers.arm(key, at_ms)

    def unschedule(self, key: str) -> None:
        """Disarm a timer; unknown keys are ignored."""
        self._timers.disarm(key)

    def caught_up(self, *topics: str) -> bool:
        """True when these inputs (all that are not paused, when none is named) are read to their ends."""
        return self._frontier.caught_up(self.places_of(topics))

    def places_of(self, topics: Iterable[str] = ()) -> list[Place]:
        """Input partitions of the topics named, or of all that are not paused."""
        names = tuple(topics) or tuple(t for t in self._by_topic if t not in self.paused)
        return [place for name in names for place in self._by_topic[name]]

    def position(self, topic: str, partition: int) -> int:
        """Offset of the next record that will be read from an input partition."""
        return self._frontier.positions[topic, partition]

    def end_offset(self, topic: str, partition: int) -> int:
        """The last stable end of an input partition, asked for at this moment; waits while the broker is away."""
        return self._frontier.end_now((topic, partition))

    def outage_end_ms(self) -> int:
        """When the broker was last found back, or when this task was assigned, whichever is later."""
        return max(self.assigned_ms, self._frontier.outage_end_ms)

    def set_paused(self, topic: str, paused: bool) -> None:
        """Stop or go on reading an input topic."""
        if (topic in self.paused) != paused:
            (self.paused.add if paused else self.paused.discard)(topic)
            self._pause(self._by_topic[topic], paused)

    def drop(self, received: Received, reason: str) -> None:
        """Count a record that is not used, by reason."""
        self.metrics.count("dropped_total", topic=received.topic, reason=reason)


@cache
def _version() -> str:
    """The version of headrace; asking for it reads the metadata of what is installed."""
    return version("headrace")
