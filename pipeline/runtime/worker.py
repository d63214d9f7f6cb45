"""The worker: one sub-topology, one consumer, one transactional producer, one thread (protocol 2, 7).

Turn after turn it folds records until nothing came for 2 ms or the transaction is old enough, fires timers, lets the
stages act and commits outputs, changelogs and positions in one transaction. It owns what happens when a transaction is
aborted, the producer is lost, or the group moves partitions.
"""

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from headrace.connectors.kafka import Connection, RawRecord
from headrace.connectors.kafka_errors import MissingTopic
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.marks import Mark
from headrace.connectors.transaction import ProducerLost, Transaction, TransactionAborted, Watchdog
from headrace.pipeline.runtime.assignment import input_places, output_places, tasks_of
from headrace.pipeline.runtime.attach import Attacher
from headrace.pipeline.runtime.frontier import Frontier, Place
from headrace.pipeline.runtime.members import Membership
from headrace.pipeline.runtime.metrics import Registry
from headrace.pipeline.runtime.questions import Questions
from headrace.pipeline.runtime.stage import StageFactory
from headrace.pipeline.runtime.task import Task, TaskState
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.ids import changelog_topic, consumer_group, transactional_id
from headrace.schemas.topics import STORES, SUB_TOPOLOGIES

__all__ = ("Worker", "wall_ms")

log = logging.getLogger(__name__)

DRY_SECONDS = 0.002
"""A turn ends when nothing came for so long."""
TURN_SECONDS = 0.05
"""... or when it is so old, or ten times the last commit's duration, ..."""
LONGEST_TURN_SECONDS = 0.5
TURN_RECORDS = 10_000
TURN_BYTES = 64 << 20
TICK_SECONDS = 0.1
REPORT_SECONDS = 10.0
BACK_OFF_SECONDS = 1.0
"""A successor gets this time to leave its mark before a lost producer is replaced."""
FETCH_WAIT_MS = 200
"""Long poll of the inputs: how late the end of a quiet partition is noticed."""


class ConsumerLost(Exception):
    """The consumer is of no use; only a new one can join the group."""


def wall_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Worker:
    """Runs the tasks of one sub-topology that the consumer group gives to this instance."""

    def __init__(
        self,
        connection: Connection,
        config: RunConfig,
        sub_topology: str,
        instance: str,
        factory: StageFactory,
        *,
        stop: StopSignal,
        metrics: Registry | None = None,
        watchdog: Watchdog | None = None,
        clock: Callable[[], int] = wall_ms,
    ) -> None:
        self._connection = connection
        self._config = config
        self._sub_topology = sub_topology
        self._instance = instance
        self._factory = factory
        self._stop = stop
        self._metrics = metrics or Registry()
        self._watchdog = watchdog or Watchdog(connection.answers)
        self._clock = clock
        self._tasks: dict[int, Task] = {}
        self._suspended: dict[int, Task] = {}
        self._places: dict[Place, Task] = {}
        self._trouble: Exception | None = None
        self._mark: Mark | None = None
        self._counts: dict[str, int] = {}
        self._folded = self._commits = 0
        self._reported = time.monotonic()

    def run(self) -> None:
        """Work until every task is finished or the process must stop.

        Raises Superseded, MissingTopic, and ConfigurationError for positions that do not fit. Whatever a stage raises
        outside ``process`` ends the worker too.
        """
        self._prepare()
        try:
            self._replace_producer(0.0)
            self._members.join(SUB_TOPOLOGIES[self._sub_topology])
            while not self._stop.is_set() and not self._finished():
                self._guarded(self._turn)
        except ProducerLost as error:
            log.info("%s: stopped without its last commit: %s", self._sub_topology, error)
        finally:
            self._report(last=True)
            self._close()

    # clients

    def _prepare(self) -> None:
        sub, connection = self._sub_topology, self._connection
        connection.wait_for_broker()
        self._counts = connection.list_run_topics()
        outputs = {topic for topic in SUB_TOPOLOGIES[sub] if topic not in self._counts}
        if outputs:
            raise MissingTopic(
                f"topics {', '.join(map(connection.topic, sorted(outputs)))} do not exist on the cluster at "
                f"{connection.bootstrap}; create the run's topics first"
            )
        self._inputs = input_places(sub, self._counts)
        self._name = f"{sub}.{self._instance}"
        self._make_consumer()
        self._questions = Questions(
            connection, self._consumer, consumer_group(connection.run, sub), self._name, self._stop
        )
        self._frontier = Frontier(self._questions.ends, self._questions.newest, self._on_outage, self._clock)
        self._attacher = Attacher(connection, self._questions, self._stop)

    def _make_consumer(self) -> None:
        self._consumer = self._connection.consumer(
            self._instance,
            consumer_group(self._connection.run, self._sub_topology),
            group_instance_id=self._instance,
            enable_partition_eof=True,
            fetch_wait_max_ms=FETCH_WAIT_MS,
        )
        self._members = Membership(self._connection, self._consumer, self._on_revoke, self._on_lost)

    def _new_task(self, number: int, places: tuple[Place, ...]) -> Task:
        return Task(
            config=self._config,
            sub_topology=self._sub_topology,
            number=number,
            places=places,
            factory=self._factory,
            sink=self._write,
            frontier=self._frontier,
            metrics=self._metrics,
            clock=self._clock,
            pause=self._pause,
        )

    def _write(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes | None]],
    ) -> None:
        self._transaction.produce(self._connection.topic(topic), value, partition, key, headers)

    def _replace_producer(self, back_off: float) -> None:
        """Make a producer that owns the transactional id: init, sweep, read the marks (protocol 7).

        Raises Superseded when another process of this instance took over, ProducerLost on stop.
        """
        while True:
            if back_off:
                self._stop.wait(back_off)
                self._refuse_successor()
            try:
                producer = self._connection.producer(
                    self._name, transactional_id(self._connection.run, self._sub_topology, self._instance)
                )
                self._transaction = Transaction(producer, self._watchdog, self._stop.is_set)
                self._transaction.initialise()
                self._sweep()
                marks = self._questions.marks([*self._inputs, self._own_place])
                if self._mark is None:
                    self._mark = Mark.next(self._instance, marks, self._clock())
                self._mark.refuse_successor(marks)
                self._leave_mark()
            except (ProducerLost, TransactionAborted) as error:
                if self._stop.is_set():
                    raise
                log.warning("%s: no producer yet: %s", self._name, error)
                back_off = BACK_OFF_SECONDS
            else:
                return

    @property
    def _own_place(self) -> Place:
        """Where this instance leaves its mark before it has any task: a place that no group reads."""
        topic = changelog_topic(self._sub_topology, STORES[self._sub_topology][0])
        return topic, zlib.crc32(self._instance.encode()) % self._counts[topic]

    def _leave_mark(self) -> None:
        topic, partition = self._own_place
        place = TopicPartition(self._connection.topic(topic), partition, 0, str(self._mark))
        self._transaction.commit([place], self._questions.outsider())

    def _refuse_successor(self) -> None:
        """Raise Superseded when a later process of this instance has left its mark."""
        if self._mark is not None:
            self._mark.refuse_successor(self._questions.marks([*self._inputs, self._own_place]))

    def _sweep(self) -> None:
        places = [(self._connection.topic(t), p) for t, p in output_places(self._sub_topology, self._counts)]
        topic, partition = self._inputs[0]
        offset = TopicPartition(self._connection.topic(topic), partition, 0)
        self._transaction.sweep(places, offset, self._questions.outsider())

    # turns

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run one step; what went wrong with the transaction is put right here."""
        try:
            step()
            if self._trouble is not None:
                trouble, self._trouble = self._trouble, None
                raise trouble
        except TransactionAborted as aborted:
            self._guarded(partial(self._start_over, aborted))
        except ProducerLost as lost:
            if self._stop.is_set():
                raise
            self._guarded(partial(self._recover, lost))
        except ConsumerLost as gone:
            self._guarded(partial(self._rejoin, gone))

    def _turn(self) -> None:
        if self._members.given is not None:
            self._attach()
        self._read()
        if self._members.given is not None or self._trouble is not None:
            return
        tasks = self._tasks.values()
        for task in tasks:
            task.fire_timers()
        tick = time.monotonic() - TICK_SECONDS
        for task in tasks:
            if task.touched or task.acted <= tick:
                task.act()
        self._commit()
        self._frontier.probe()
        self._report()

    def _read(self) -> None:
        """Fold records until nothing came for 2 ms or the turn is old or large enough."""
        poll = self._consumer.poll
        message = poll(self._patience())
        if message is None:
            return
        began = time.monotonic()
        limit = min(LONGEST_TURN_SECONDS, max(TURN_SECONDS, 10 * self._transaction.last_commit_seconds))
        records = size = 0
        while message is not None:
            if message.error() is None:
                self._fold(message)
                records += 1
                size += len(message)
                if records >= TURN_RECORDS or size >= TURN_BYTES:
                    break
            else:
                self._meet(message)
            if time.monotonic() - began >= limit or self._members.given is not None:
                break
            message = poll(DRY_SECONDS)
        self._folded += records
        self._frontier.heard()

    def _patience(self) -> float:
        """How long the first poll of a turn may wait."""
        if not self._tasks:
            return TICK_SECONDS
        due = min((d for t in self._tasks.values() if (d := t.next_due_ms()) is not None), default=None)
        if due is None:
            return TICK_SECONDS
        left = (due - self._clock()) / 1000
        return TICK_SECONDS if left <= 0 else min(TICK_SECONDS, left)

    def _fold(self, message: Message) -> None:
        raw = RawRecord.of(message, self._connection.run)
        task = self._places.get((raw.topic, raw.partition))
        if task is not None:
            task.take(raw)

    def _meet(self, message: Message) -> None:
        """What the consumer reports: the end of a partition, or an error."""
        error = message.error()
        if error is None:
            return
        if error.code() == KafkaError._PARTITION_EOF:
            self._frontier.read_to_end(self._place(message), message.offset() or 0)
            return
        if error.code() == KafkaError._FATAL or error.fatal():
            raise ConsumerLost(error.str())
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            self._out_of_range(self._place(message), error.str())
            return
        log.warning("%s: %s: %s", self._name, error.name(), error.str())

    def _place(self, message: Message) -> Place:
        return (message.topic() or "").removeprefix(f"{self._connection.run}."), message.partition() or 0

    def _out_of_range(self, place: Place, reason: str) -> None:
        """The broker has no such offset: read on if that was a passing state, else say what was lost."""
        topic, partition = place
        position = self._frontier.positions.get(place)
        if position is None:
            return
        first = self._connection.start_offsets(topic)[partition]
        end = self._connection.end_offsets(topic, committed=False)[partition]
        if not first <= position <= end:
            raise ConfigurationError(
                f"{self._connection.topic(topic)}[{partition}]@{position}: the broker holds offsets {first} to {end} "
                f"({reason}). Records that were not read yet were deleted or lost; start a new run, or restore the "
                "topic's data"
            )
        self._assign(self._frontier.positions)

    def _commit(self) -> None:
        """One transaction: outputs, changelogs, positions. Raises TransactionAborted, ProducerLost."""
        dirty = [task for task in self._tasks.values() if task.dirty]
        if not dirty and not self._transaction.open:
            return
        offsets: list[TopicPartition] = []
        mark = str(self._mark)
        for task in dirty:
            task.write_changelog()
            offsets += [
                TopicPartition(self._connection.topic(topic), partition, offset, mark)
                for (topic, partition), offset in task.positions().items()
            ]
        self._transaction.commit(offsets, self._members.metadata)
        for task in dirty:
            task.commit()
        self._frontier.heard()
        self._commits += 1

    # partitions

    def _assign(self, positions: dict[Place, int]) -> None:
        self._consumer.assign(
            [TopicPartition(self._connection.topic(t), p, offset) for (t, p), offset in positions.items()]
        )
        paused = [place for task in self._tasks.values() for place in task.paused_places]
        self._pause([place for place in positions if place not in paused], False)
        self._pause(paused, True)

    def _pause(self, places: Sequence[Place], paused: bool) -> None:
        partitions = [TopicPartition(self._connection.topic(t), p) for t, p in places]
        if partitions:
            (self._consumer.pause if paused else self._consumer.resume)(partitions)

    def _attach(self) -> None:
        """Take over the partitions that the group gave: restore, position, open, leave the mark."""
        plan = tasks_of(self._sub_topology, self._members.given or [], self._counts)
        for number in set(self._suspended) - set(plan):
            self._suspended.pop(number).move_to(TaskState.CLOSED)
        tasks = [
            self._suspended.pop(n) if n in self._suspended else self._new_task(n, places) for n, places in plan.items()
        ]
        attached = self._attacher.attach(tasks, self._new_task)
        self._members.given = None
        positions: dict[Place, int] = {}
        for task, at in attached:
            self._tasks[task.number] = task
            positions |= at
        self._index()
        self._frontier.attach(positions)
        self._assign(positions)
        for task, _ in attached:
            if task.state is TaskState.SUSPENDED:
                task.resume()
            else:
                task.start()
            task.touched = True
        log.info("%s: runs tasks %s", self._name, sorted(self._tasks) or "none")
        self._commit()

    def _index(self) -> None:
        self._places = {place: task for task in self._tasks.values() for place in task.places}

    def _drop_tasks(self) -> list[Task]:
        tasks = list(self._tasks.values())
        self._tasks = {}
        self._index()
        self._frontier.detach([place for task in tasks for place in task.places])
        return tasks

    def _on_revoke(self) -> None:
        """Nothing open survives a revocation; stores are kept in case the tasks come back."""
        try:
            self._commit()
        except (TransactionAborted, ProducerLost) as error:
            self._trouble = error if isinstance(error, ProducerLost) else None
            log.warning("%s: what was open at the revocation is undone: %s", self._name, error)
            self._close_tasks()
            return
        tasks = self._drop_tasks()
        if not self._stop.is_set():
            self._suspended = {task.number: task for task in self._attacher.suspend(tasks)}

    def _on_lost(self) -> None:
        log.warning("%s: the group moved on without this member", self._name)
        self._close_tasks()
        try:
            self._transaction.abort()
        except ProducerLost as error:
            self._trouble = error

    def _close_tasks(self) -> None:
        for task in [*self._drop_tasks(), *self._suspended.values()]:
            task.move_to(TaskState.CLOSED)
        self._suspended = {}

    # faults

    def _start_over(self, error: TransactionAborted) -> None:
        """The transaction was undone: stages and positions go back to the last commit."""
        log.warning("%s: aborted and tried again: %s", self._name, error)
        self._metrics.count("transactions_aborted_total", stage=self._sub_topology)
        self._transaction.abort()
        if error.membership:
            self._close_tasks()
            self._consumer.assign([])
            return
        positions: dict[Place, int] = {}
        for task in self._tasks.values():
            positions |= task.reset()
        self._assign(positions)
        for task in self._tasks.values():
            task.reopen()

    def _recover(self, error: ProducerLost) -> None:
        """The lost-producer procedure: drop everything uncommitted, make a new producer, attach anew."""
        log.warning("%s: producer lost: %s", self._name, error)
        self._metrics.count("producers_lost_total", stage=self._sub_topology)
        start = time.monotonic()
        self._transaction.discard()
        held = [place for task in self._tasks.values() for place in task.places]
        self._close_tasks()
        if held:
            self._consumer.assign([])
            self._members.given = held
        self._replace_producer(BACK_OFF_SECONDS)
        log.info("%s: a new producer after %.1f s", self._name, time.monotonic() - start)

    def _rejoin(self, error: ConsumerLost) -> None:
        """The consumer failed for good: a successor joined, or the cluster forgot this member over a restart."""
        log.warning("%s: consumer lost: %s", self._name, error)
        self._close_tasks()
        self._transaction.abort()
        self._consumer.close()
        self._stop.wait(BACK_OFF_SECONDS)
        self._refuse_successor()
        self._make_consumer()
        self._questions.consumer = self._consumer
        self._members.join(SUB_TOPOLOGIES[self._sub_topology])

    def _on_outage(self, start_ms: int, end_ms: int) -> None:
        log.warning("%s: no broker for %.1f s; timers are moved", self._name, (end_ms - start_ms) / 1000)
        for task in self._tasks.values():
            task.shift_timers(start_ms, end_ms)

    # end

    def _finished(self) -> bool:
        return bool(self._tasks) and not self._transaction.open and all(t.finished() for t in self._tasks.values())

    def _report(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if now - self._reported < REPORT_SECONDS and not last:
            return
        lag = sum(max(0, self._questions.newest(p) - o) for p, o in self._frontier.positions.items())
        log.info(
            "%s: tasks %s, %d records, %d commits in %.0f s, lag %d",
            self._name, sorted(self._tasks) or "none", self._folded, self._commits, now - self._reported, lag,
        )  # fmt: skip
        labels = {"stage": self._sub_topology}
        self._metrics.count("records_total", self._folded, **labels)
        self._metrics.count("commits_total", self._commits, **labels)
        self._metrics.gauge("lag_records", lag, **labels)
        self._metrics.gauge("last_commit_seconds", self._transaction.last_commit_seconds, **labels)
        self._folded = self._commits = 0
        self._reported = now

    def _close(self) -> None:
        self._tasks = {}
        self._index()
        self._transaction.discard()
        try:
            self._consumer.close()
        except KafkaException as error:
            log.info("%s: leaving the group: %s", self._name, error)
        self._questions.close()
