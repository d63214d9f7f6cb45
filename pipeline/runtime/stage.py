"""The contract between the runtime and a stage: what a stage is given, what it may do, and what it is promised.

A stage is the logic of one task of a sub-topology: a fold of its input partitions whose state, positions and outputs
commit together. It does no I/O, has no clock and no threads of its own; it only calls its Context. The same stage runs
under the worker on Kafka, under the test driver and under simulation (protocol 7).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from headrace.schemas.config import RunConfig
from headrace.schemas.parts import Source
from headrace.schemas.records import Record

__all__ = ("Closing", "Context", "Metrics", "Received", "Stage", "Store")


class Received(NamedTuple):
    """One input record with its place. ``topic`` is without the run's prefix, ``timestamp_ms`` is Kafka's."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    record: Record
    size: int = 0
    value: bytes = b""
    """The bytes that ``record`` was decoded from, if they can be decoded again without their headers; else empty."""

    @property
    def source(self) -> Source:
        """The place as a part for ``sources``."""
        return Source(topic=self.topic, partition=self.partition, offset=self.offset)


class Store(Protocol):
    """Keyed state of a task: a committed map under an overlay of uncommitted writes; changelogged by the runtime."""

    def get(self, key: bytes) -> bytes | None:
        """The newest value of a key, uncommitted writes included."""
        ...

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key within the current transaction."""
        ...

    def delete(self, key: bytes) -> None:
        """Remove a key within the current transaction."""
        ...

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys with the prefix in byte order with their values, over a snapshot taken at the call."""
        ...


class Metrics(Protocol):
    """Counters and gauges of a stage; names in Prometheus style without the common prefix."""

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        ...

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        ...


class Context(Protocol):
    """What a stage may use. All effects of one call are buffered; an exception in the call discards them."""

    run: str
    config: RunConfig
    sub_topology: str
    partition: int
    """Number of the task: its partition (0 for ``schedule``)."""
    metrics: Metrics

    def now(self) -> int:
        """Milliseconds since the epoch, by the injected clock; constant within one call."""
        ...

    def emit(
        self, topic: str, record: Record, *, partition: int, key: bytes | None = None, value: bytes | None = None
    ) -> None:
        """Write a record to an output topic (name without the run's prefix) within the current transaction.

        ``value`` is the record already encoded by ``codec.encode``; it is written as it is (a digest covers it).
        """
        ...

    def store(self, name: str = "state") -> Store:
        """The task's store of that name."""
        ...

    def schedule(self, key: str, at_ms: int) -> None:
        """Arm (or move) the persisted timer ``key``; it fires once, through ``Stage.on_timer``."""
        ...

    def unschedule(self, key: str) -> None:
        """Disarm a timer; unknown keys are ignored."""
        ...

    def caught_up(self, *topics: str) -> bool:
        """True when these inputs (all, when none is named) have been read to an end offset asked for in this turn or,
        while nothing suggests a gap, known from the newest fetch. Dispatch and decisions about silence need it.
        """
        ...

    def position(self, topic: str, partition: int) -> int:
        """Offset of the next record that will be read from an input partition."""
        ...

    def end_offset(self, topic: str, partition: int) -> int:
        """The end offset of an input partition as seen in the newest fetch or query (last stable offset)."""
        ...

    def outage_end_ms(self) -> int:
        """When the broker was last found back after an outage, or when this task was assigned, whichever is later.

        Time before it counts neither as silence of a worker nor towards a deadline (protocol 7).
        """
        ...

    def set_paused(self, topic: str, paused: bool) -> None:
        """Stop or go on reading an input topic of small records (``prompts``); idempotent."""
        ...

    def drop(self, received: Received, reason: str) -> None:
        """Note that a record is not used, with a named reason (a metric; never silent)."""
        ...


class Stage(Protocol):
    """One task's logic. After an abort or an exception the runtime makes a new stage and calls ``open`` again."""

    def open(self, context: Context) -> None:
        """Build the in-memory view from the stores; called before anything else, after restore."""
        ...

    def process(self, received: Received, context: Context) -> None:
        """Fold one record. An exception discards this call's effects and sends the record to ``dead-letters``."""
        ...

    def on_timer(self, key: str, at_ms: int, context: Context) -> None:
        """A timer is due *and* the inputs have been read to the end offsets seen when it became due."""
        ...

    def act(self, context: Context) -> None:
        """Decide on what has been folded; called at the end of every turn (a run of records or timers, or a tick each
        100 ms when idle), in the same transaction. An exception here ends the worker.
        """
        ...

    def finished(self) -> bool:
        """True when this task's part of the run is over; the worker ends when all its tasks say so."""
        ...


@runtime_checkable
class Closing(Protocol):
    """A stage that took something when it was opened."""

    def close(self) -> None:
        """Let go of it: the task is over, or a new stage takes this one's place."""
        ...


class StageFactory(Protocol):
    """Makes the stage of one task."""

    def __call__(self, config: RunConfig, partition: int) -> Stage:
        """A new stage for the task with this number."""
        ...


Outputs = Sequence[tuple[str, int, bytes | None, Record]]
