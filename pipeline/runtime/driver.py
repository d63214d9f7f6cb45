"""Stages without a broker: topics in memory, a clock that is set, crashes where a test wants them.

``TopologyDriver`` runs the tasks of the three sub-topologies by the promises of ``stage.Context``: one call is atomic,
one turn is a transaction, timers wait until the inputs have been read to the ends seen when they became due, and a task
that crashes is opened again from its committed store. Everything else (workers, trainers, sources) is played by the
caller through ``append`` and ``log``.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace.pipeline.runtime.stage import Metrics, Received, Stage, StageFactory, Store
from headrace.pipeline.runtime.store import MemoryStore, StoreView
from headrace.pipeline.runtime.timers import Timers
from headrace.schemas import codec
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import HeadraceError
from headrace.schemas.records import Record, Stop
from headrace.schemas.topics import SUB_TOPOLOGIES, partition_counts

__all__ = ("Counts", "Crash", "Entry", "TopologyDriver")

Place = tuple[str, int]
Crash = Literal["none", "before_commit", "after_commit"]
Reader = Callable[[Place, int], int]
"""How many of the waiting records of an input a turn reads: (place, waiting) -> 0 .. waiting."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One record in a topic."""

    timestamp_ms: int
    record: Record
    key: bytes | None = None
    value: bytes = b""


_FORGOTTEN = Entry(-1, Stop(reason="forgotten"))


class Counts:
    """Metrics of all tasks, for assertions: ``counters[name, labels]`` and ``gauges[name, labels]``."""

    def __init__(self) -> None:
        self.counters: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self.gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        self.counters[name, tuple(sorted(labels.items()))] += value  # type: ignore[assignment]

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self.gauges[name, tuple(sorted(labels.items()))] = value

    def total(self, name: str) -> float:
        """A counter summed over its labels."""
        return sum(value for (counted, _), value in self.counters.items() if counted == name)


@dataclass
class _Task:
    sub_topology: str
    number: int
    inputs: list[Place]
    store: MemoryStore
    positions: dict[Place, int]
    stage: Stage | None = None
    timers: Timers | None = None
    barrier: tuple[int, dict[Place, int]] | None = None
    paused: set[str] = field(default_factory=set)
    assigned_ms: int = 0
    outputs: list[tuple[str, int, bytes | None, bytes | None, Record]] = field(default_factory=list)

    def stage_is_over(self) -> bool:
        """Whether the stage runs and has finished."""
        return self.stage is not None and self.stage.finished()


class _Context:
    """A Context of one task over the driver's topics."""

    def __init__(self, driver: "TopologyDriver", task: _Task) -> None:
        self.run = driver.config.run.id
        self.config = driver.config
        self.sub_topology = task.sub_topology
        self.partition = task.number
        self.metrics: Metrics = driver.metrics
        self._driver, self._task = driver, task

    def now(self) -> int:
        return self._driver.now_ms

    def emit(
        self, topic: str, record: Record, *, partition: int, key: bytes | None = None, value: bytes | None = None
    ) -> None:
        if not 0 <= partition < self._driver.partitions[topic]:
            raise ValueError(f"{topic} has no partition {partition}")
        self._task.outputs.append((topic, partition, key, value, record))

    def store(self, name: str = "state") -> Store:
        return StoreView(self._task.store, b"s" + name.encode() + b"/")

    def schedule(self, key: str, at_ms: int) -> None:
        assert self._task.timers is not None
        self._task.timers.arm(key, at_ms)

    def unschedule(self, key: str) -> None:
        assert self._task.timers is not None
        self._task.timers.disarm(key)

    def caught_up(self, *topics: str) -> bool:
        return all(
            self._task.positions[place] >= len(self._driver.log[place])
            for place in self._task.inputs
            if not topics or place[0] in topics
        )

    def position(self, topic: str, partition: int) -> int:
        return self._task.positions[topic, partition]

    def end_offset(self, topic: str, partition: int) -> int:
        return len(self._driver.log[topic, partition])

    def outage_end_ms(self) -> int:
        return max(self._driver.reachable_since_ms, self._task.assigned_ms)

    def set_paused(self, topic: str, paused: bool) -> None:
        (self._task.paused.add if paused else self._task.paused.discard)(topic)

    def drop(self, received: Received, reason: str) -> None:
        self._driver.metrics.count("dropped_total", topic=received.topic, reason=reason)


class TopologyDriver:
    """Topics, tasks and time of one run. Stages come from ``pipeline.flow.STAGES`` or any mapping like it."""

    def __init__(self, config: RunConfig, stages: Mapping[str, StageFactory], *, start_ms: int = 1_000_000) -> None:
        self.config = config
        self.stages = stages
        self.now_ms = start_ms
        self.reachable_since_ms = start_ms
        """End of the last outage."""
        self.metrics = Counts()
        self.log: dict[Place, list[Entry]] = defaultdict(list)
        self.dead_letters: list[tuple[Received, HeadraceError]] = []
        """Records whose ``process`` raised a HeadraceError, with it; any other exception is a fault of the stage."""
        self.listeners: list[Callable[[Place], None]] = []
        """Called with the place of every record that is written."""
        sizes = config.run
        self.partitions = partition_counts(
            config.policy_names(), groups=sizes.group_partitions, inboxes=sizes.inboxes, lanes=sizes.lanes
        )
        self.tasks: dict[Place, _Task] = {}
        for sub in stages:
            for number in range(self._task_count(sub)):
                self._add_task(sub, number)

    # ------------------------------------------------------------------------------------------------ topics

    def append(self, topic: str, record: Record, *, partition: int = 0, key: bytes | None = None) -> int:
        """Write a record from outside; gives its offset. The record goes through the codec."""
        return self._write((topic, partition), self.entry(record, key, None))

    def records(self, topic: str, partition: int | None = None) -> list[Record]:
        """The records of a topic (one partition, or all of them one after the other)."""
        numbers = range(self.partitions[topic]) if partition is None else (partition,)
        return [entry.record for number in numbers for entry in self.log[topic, number]]

    def behind(self, sub_topology: str, number: int = 0) -> bool:
        """Whether a task has input to read."""
        task = self.tasks[sub_topology, number]
        return any(len(self.log[place]) > task.positions[place] for place in task.inputs if place[0] not in task.paused)

    def forget(self, place: Place) -> None:
        """Drop what the newest record of a place holds; its offset stays. For long inputs that are read once."""
        if self.log[place]:
            self.log[place][-1] = _FORGOTTEN

    def next_due_ms(self, sub_topology: str) -> tuple[int, int] | None:
        """The first timer of any of its tasks: (when it is due, number of the task); None without timers."""
        due = [
            (at, number)
            for (sub, number), task in self.tasks.items()
            if sub == sub_topology and task.timers is not None and (at := task.timers.next_due_ms()) is not None
        ]
        return min(due, default=None)

    def entry(self, record: Record, key: bytes | None, value: bytes | None) -> Entry:
        """What is written of a record: it goes through the codec, so that a stage meets what a topic would give it."""
        encoded = codec.encode(record) if value is None else value
        return Entry(self.now_ms, codec.decode(encoded), key, encoded)

    # ------------------------------------------------------------------------------------------------ turns

    def turn(self, sub_topology: str, number: int = 0, *, read: Reader | None = None, crash: Crash = "none") -> bool:
        """One transaction of a task: read, fire timers, act, commit. False when nothing was read or written.

        ``read`` limits what is read of each input; ``crash`` ends the task before its commit (nothing has happened) or
        after it. A crashed task opens again at its next turn.
        """
        task = self.tasks[sub_topology, number]
        context = self._opened(task)
        before = dict(task.positions)
        read_any = False
        for place in task.inputs:
            read_any = self._read(task, place, read, context) or read_any
        fired = self._fire(task, context)
        stage = task.stage
        assert stage is not None
        stage.act(context)
        if crash == "before_commit":
            task.positions = before
            self.crash(sub_topology, number)
            return True
        wrote = task.store.dirty or bool(task.outputs)
        self._commit(task)
        if crash == "after_commit":
            self.crash(sub_topology, number)
        return read_any or fired or wrote

    def crash(self, sub_topology: str, number: int = 0) -> None:
        """Lose everything of a task that is not committed."""
        task = self.tasks[sub_topology, number]
        task.store.abort()
        task.outputs.clear()
        task.paused.clear()
        task.stage, task.timers, task.barrier = None, None, None

    def settle(self, limit: int = 10_000) -> None:
        """Turn all tasks until none has anything to do at this time. Raises RuntimeError after ``limit`` turns."""
        for _ in range(limit):
            busy = [self.turn(sub, number) for sub, number in self.tasks]
            if not any(busy):
                return
        raise RuntimeError(f"the tasks did not come to rest within {limit} turns")

    def advance(self, milliseconds: int) -> None:
        """Move the clock, then let all tasks come to rest."""
        self.now_ms += milliseconds
        self.settle()

    def stage_of(self, sub_topology: str, number: int = 0) -> Stage:
        """The running stage of a task, opened if it is not."""
        task = self.tasks[sub_topology, number]
        self._opened(task)
        assert task.stage is not None
        return task.stage

    # ------------------------------------------------------------------------------------------------ inside

    def _task_count(self, sub: str) -> int:
        if sub == "schedule":
            return 1
        return self.partitions[SUB_TOPOLOGIES[sub][0]]

    def _add_task(self, sub: str, number: int) -> None:
        topics = SUB_TOPOLOGIES[sub]
        every = sub == "schedule"
        inputs = [(t, p) for t in topics for p in (range(self.partitions[t]) if every else (number,))]
        self.tasks[sub, number] = _Task(sub, number, inputs, MemoryStore(), dict.fromkeys(inputs, 0))

    def _opened(self, task: _Task) -> _Context:
        context = _Context(self, task)
        if task.stage is None:
            task.stage = self.stages[task.sub_topology](self.config, task.number)
            task.timers = Timers(task.store)
            task.assigned_ms = self.now_ms
            task.stage.open(context)
        return context

    def _read(self, task: _Task, place: Place, read: Reader | None, context: _Context) -> bool:
        log, position = self.log[place], task.positions[place]
        waiting = len(log) - position
        count = waiting if read is None else read(place, waiting)
        done = 0
        while done < count and place[0] not in task.paused:
            self._process(task, place, position + done, context)
            done += 1
            task.positions[place] = position + done
        return done > 0

    def _process(self, task: _Task, place: Place, offset: int, context: _Context) -> None:
        entry = self.log[place][offset]
        received = Received(
            topic=place[0], partition=place[1], offset=offset, timestamp_ms=entry.timestamp_ms, record=entry.record,
            size=len(entry.value), value=entry.value,
        )  # fmt: skip
        assert task.stage is not None and task.timers is not None
        task.store.mark()
        task.timers.mark()
        written = len(task.outputs)
        try:
            task.stage.process(received, context)
        except HeadraceError as error:
            task.timers.undo()
            task.store.undo()
            del task.outputs[written:]
            self.dead_letters.append((received, error))
            task.stage = self.stages[task.sub_topology](self.config, task.number)
            task.stage.open(context)

    def _fire(self, task: _Task, context: _Context) -> bool:
        assert task.stage is not None and task.timers is not None
        due = task.timers.next_due_ms()
        if due is None or due > self.now_ms:
            return False
        if task.barrier is None:
            task.barrier = (self.now_ms, {place: len(self.log[place]) for place in task.inputs})
        until, ends = task.barrier
        if any(task.positions[p] < end for p, end in ends.items() if p[0] not in task.paused):
            return False
        task.barrier = None
        while (timer := task.timers.pop_due(until)) is not None:
            task.stage.on_timer(*timer, context)
        return True

    def _commit(self, task: _Task) -> None:
        written: list[tuple[Place, Entry]] = []
        for topic, partition, key, value, record in task.outputs:
            written.append(((topic, partition), self.entry(record, key, value)))
        task.outputs.clear()
        task.store.commit()
        for place, entry in written:
            self._write(place, entry)

    def _write(self, place: Place, entry: Entry) -> int:
        self.log[place].append(entry)
        for listener in self.listeners:
            listener(place)
        return len(self.log[place]) - 1
