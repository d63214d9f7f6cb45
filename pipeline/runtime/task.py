"""One task: a stage over its stores, timers and input positions, with every effect of a call made or none.

A task knows no Kafka client: records come in through ``take``, outputs and changelog records go out through a sink (the
worker's transaction), and ``commit`` or ``reset`` say how the transaction ended. ``lifecycle`` has the steps of its
life.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.connectors.transaction import SWEEP_RECORD, ProducerLost, TransactionAborted
from headrace.pipeline.runtime.context import Output, TaskContext
from headrace.pipeline.runtime.dead_letters import TOPIC as DEAD_LETTERS
from headrace.pipeline.runtime.dead_letters import UnusableShare, letter_headers, letter_key, letter_value
from headrace.pipeline.runtime.frontier import Frontier, Place
from headrace.pipeline.runtime.lifecycle import TaskState, moved
from headrace.pipeline.runtime.metrics import StageMetrics
from headrace.pipeline.runtime.sqlite_store import StoreFile
from headrace.pipeline.runtime.stage import Closing, Metrics, Received, Stage, StageFactory
from headrace.pipeline.runtime.store import MemoryStore, OverlayStore
from headrace.pipeline.runtime.timers import Timers
from headrace.schemas.codec import decode_received
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError, UndecodableRecord
from headrace.schemas.ids import changelog_topic
from headrace.schemas.topics import STORES

__all__ = ("Message", "Sink", "Task", "TaskState")

log = logging.getLogger(__name__)

POSITIONS_KEY = b"p"
"""Store key of the input positions and the time at which they were saved."""
TIMER_BUDGET_SECONDS = 0.05
"""Time for timers within one turn; the rest fire in the next."""

_SWEPT = ("hr-record", SWEEP_RECORD)
Headers = list[tuple[str, bytes | None]]


class Sink(Protocol):
    """Where a task's records go: the open transaction. Topics are without the run's prefix."""

    def __call__(self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        """Write one record. Raises TransactionAborted, ProducerLost."""
        ...


class Message(Protocol):
    """One input record as it was read: RawRecord, or a test's own."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def timestamp_ms(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Headers: ...


class Task:
    """One task of a sub-topology."""

    def __init__(
        self,
        *,
        config: RunConfig,
        sub_topology: str,
        number: int,
        places: tuple[Place, ...],
        factory: StageFactory,
        sink: Sink,
        frontier: Frontier,
        metrics: Metrics,
        clock: Callable[[], int],
        pause: Callable[[list[Place], bool], None],
        stores: Mapping[str, OverlayStore] | None = None,
    ) -> None:
        """``stores`` by name are taken over with what they hold; without them the task starts with empty memory."""
        self.number = number
        self.places = places
        self.state = TaskState.CREATED
        self.touched = False
        """True when something was folded or written since the last commit."""
        self.acted = 0.0
        """Monotonic time of the last ``act``."""
        self.committed = time.monotonic()
        """Monotonic time of the last commit."""
        self.changelog_ends: dict[str, int] = {}
        """Ends of the changelogs when the task was suspended."""
        self.suspended = 0.0
        """Monotonic time at which these ends were asked for."""
        self._config = config
        self._sub_topology = sub_topology
        self._factory = factory
        self._sink = sink
        self._frontier = frontier
        self._clock = clock
        self._metrics = StageMetrics(metrics, sub_topology)
        self.stores: Mapping[str, OverlayStore] = dict(stores or {name: MemoryStore() for name in STORES[sub_topology]})
        self._first = next(iter(self.stores.values()))
        self._timers = Timers(self._first)
        self._marks = (self._timers.mark, *(store.mark for store in self.stores.values()))
        self._due_ends: tuple[int, dict[Place, int]] | None = None
        self._share = UnusableShare(config.runtime.unusable_window, config.runtime.max_unusable_share)
        self._context = TaskContext(
            config=config,
            sub_topology=sub_topology,
            partition=number,
            places=places,
            stores=self.stores,
            timers=self._timers,
            frontier=frontier,
            metrics=self._metrics,
            pause=pause,
        )
        self._stage: Stage = factory(config, number)
        self._opened = False

    # life

    def move_to(self, state: TaskState) -> None:
        """Take a step in the task's life. Raises IllegalTransition for one that it does not have."""
        self.state = moved(f"{self._sub_topology}[{self.number}]", self.state, state)

    def close(self, *, keep_stores: bool = False) -> None:
        """The end of this task. Its stores are freed unless somebody else has them now. Raises IllegalTransition."""
        self.move_to(TaskState.CLOSED)
        self._let_go()
        for store in self.stores.values() if not keep_stores else ():
            store.close()

    def stores_by_topic(self) -> dict[str, OverlayStore]:
        """The stores by the name of their changelog topic."""
        return {topic: self.stores[name] for name, topic in self.changelogs().items()}

    def changelogs(self) -> dict[str, str]:
        """Changelog topic of each store."""
        return {name: changelog_topic(self._sub_topology, name) for name in self.stores}

    def saved_positions(self) -> dict[Place, int] | None:
        """Input positions in the changelog; None when the task never committed."""
        value = self._first.get(POSITIONS_KEY)
        if value is None:
            return None
        return {(topic, partition): offset for topic, partition, offset in json.loads(value)["at"]}

    def start(self) -> None:
        """Restored: give the timers the time back in which nobody ran this task, and open the stage."""
        self._timers.reload()
        self._resume()
        self.move_to(TaskState.RUNNING)
        self._open()

    def resume(self) -> None:
        """Suspended, and nobody else wrote the changelog: go on with stores and stage as they are."""
        self._resume()
        self.move_to(TaskState.RUNNING)

    def _resume(self) -> None:
        now = self._clock()
        self._context.assigned_ms = now
        self._due_ends = None
        value = self._first.get(POSITIONS_KEY)
        if value is not None:
            self.shift_timers(int(json.loads(value)["saved_ms"]), now)

    def shift_timers(self, start_ms: int, end_ms: int) -> None:
        """Time from ``start_ms`` to ``end_ms`` does not count towards timers: there was no broker, or no worker."""
        self._due_ends = None
        if end_ms > start_ms and self._timers.shift(start_ms, end_ms):
            self.touched = True

    @property
    def paused_places(self) -> list[Place]:
        """Input partitions that the stage does not want to read at present."""
        return [place for place in self.places if place[0] in self._context.paused]

    def finished(self) -> bool:
        """True when this task's part of the run is over."""
        return self._stage.finished()

    # calls

    def take(self, message: Message) -> None:
        """Fold one record; one that cannot be used goes to ``dead-letters`` and leaves no half effects.

        Raises TransactionAborted, ProducerLost; UnusableFlood, its dead letter written, when too many cannot be used.
        """
        topic, partition, offset = message.topic, message.partition, message.offset
        self._frontier.read((topic, partition), offset)
        self.touched = True
        headers, value = message.headers, message.value or b""
        if _SWEPT in headers:
            return
        try:
            record, alone = decode_received(message.value, headers)
        except UndecodableRecord as error:
            self._bury(message, error)
            return
        received = Received(topic, partition, offset, message.timestamp_ms, record, len(value), value if alone else b"")
        self._begin_call()
        try:
            self._stage.process(received, self._context)
        except (TransactionAborted, ProducerLost, ConfigurationError, StoreFile):
            raise
        except Exception as error:  # the seam of per-record atomicity: whatever a stage or plug-in raises
            self._undo_call()
            self._open()
            self._bury(message, error)
        else:
            self._end_call()
            self._share.usable(topic)

    def fire_timers(self) -> None:
        """Fire what is due, once the inputs have been read to the ends seen after it became due (protocol 7)."""
        now = self._clock()
        due = self._timers.next_due_ms()
        if due is None or due > now:
            return
        if self._due_ends is None:
            ends = self._frontier.ends(self._context.places_of())
            if ends is None:
                return
            self._due_ends = (now, ends)
        seen, ends = self._due_ends
        if not self._frontier.reached(ends):
            return
        until = time.monotonic() + TIMER_BUDGET_SECONDS
        while True:
            self._begin_call()
            timer = self._timers.pop_due(seen)
            if timer is None:
                self._due_ends = None
                return
            self._stage.on_timer(*timer, self._context)
            self._end_call()
            self.touched = True
            if time.monotonic() > until:
                return

    def act(self) -> None:
        """Let the stage decide on what was folded."""
        self.acted = time.monotonic()
        self._begin_call()
        self._stage.act(self._context)
        self._end_call()

    def next_due_ms(self) -> int | None:
        """When the next timer is due."""
        return self._timers.next_due_ms()

    def _open(self) -> None:
        self._let_go()
        self._stage = self._factory(self._config, self.number)
        self._opened = True
        self._begin_call()
        self._stage.open(self._context)
        self._end_call()

    def _let_go(self) -> None:
        if self._opened and isinstance(self._stage, Closing):
            self._stage.close()
        self._opened = False

    def _begin_call(self) -> None:
        self._context.begin_call(self._clock())
        for mark in self._marks:
            mark()

    def _end_call(self) -> None:
        outputs: list[Output] = self._context.outputs
        if outputs:
            self.touched = True
            for output in outputs:
                self._sink(*output)

    def _undo_call(self) -> None:
        self._context.outputs.clear()
        self._timers.undo()
        for store in self.stores.values():
            store.undo()

    def _bury(self, message: Message, error: Exception) -> None:
        where = f"{message.topic}[{message.partition}]@{message.offset}"
        log.warning("%s: dead letter for %s: %s: %s", self._sub_topology, where, type(error).__name__, error)
        self._metrics.count("dead_letters_total", topic=message.topic, error=type(error).__name__)
        headers = letter_headers(
            error,
            topic=f"{self._config.run.id}.{message.topic}",
            partition=message.partition,
            offset=message.offset,
            value=message.value,
            headers=message.headers,
            stage=self._sub_topology,
            key=message.key,
        )
        self._sink(DEAD_LETTERS, 0, letter_key(message.key), letter_value(message.value), headers)
        self._share.unusable(message.topic, f"{self._config.run.id}.{where}", error)

    # the transaction

    @property
    def dirty(self) -> bool:
        """True when a commit has something to say of this task."""
        return self.touched or any(store.dirty for store in self.stores.values())

    def positions(self) -> dict[Place, int]:
        """Next offset of every input."""
        return {place: self._frontier.positions[place] for place in self.places}

    def write_changelog(self) -> None:
        """Put positions and all uncommitted writes into the transaction."""
        at = [[topic, partition, offset] for (topic, partition), offset in self.positions().items()]
        entry = {"saved_ms": self._clock(), "at": at}
        self._first.put(POSITIONS_KEY, json.dumps(entry, separators=(",", ":")).encode())
        for name, topic in self.changelogs().items():
            for key, value in self.stores[name].changes():
                self._sink(topic, self.number, key, value, [])

    def commit(self) -> None:
        """The transaction was committed."""
        for store in self.stores.values():
            store.commit()
        self.touched = False
        self.committed = time.monotonic()

    def reset(self) -> dict[Place, int]:
        """The transaction was aborted: forget its writes, open a new stage; returns the committed positions."""
        for store in self.stores.values():
            store.abort()
        self._timers.reload()
        self._due_ends = None
        self.touched = False
        self._context.paused.clear()
        positions = self.saved_positions() or dict.fromkeys(self.places, 0)
        self._frontier.attach(positions)
        return positions

    def reopen(self) -> None:
        """After ``reset``: a new stage over the committed state."""
        self._open()
