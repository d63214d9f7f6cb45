"""The worker: one sub-topology, one consumer, one transactional producer, one thread (protocol 2, 7).

Turn after turn it folds records until nothing came for 2 ms or the transaction is old enough, fires timers, lets the
stages act and commits outputs, changelogs and positions in one transaction. It owns what happens when a transaction is
aborted, the producer is lost, or the group moves partitions.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from headrace.connectors.kafka import MAX_POLL_MS, Connection, RawRecord
from headrace.connectors.kafka_errors import KafkaFailure, error_of
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.transaction import ProducerLost, TransactionAborted, Watchdog
from headrace.pipeline.runtime.assignment import tasks_of
from headrace.pipeline.runtime.attach import Attacher
from headrace.pipeline.runtime.claim import BACK_OFF_SECONDS, Claim
from headrace.pipeline.runtime.dead_letters import UnusableFlood
from headrace.pipeline.runtime.frontier import Frontier, Place
from headrace.pipeline.runtime.members import Membership
from headrace.pipeline.runtime.metrics import Registry, StageMetrics
from headrace.pipeline.runtime.presence import Presence
from headrace.pipeline.runtime.questions import Questions
from headrace.pipeline.runtime.shelf import Shelf
from headrace.pipeline.runtime.stage import StageFactory
from headrace.pipeline.runtime.store import OverlayStore
from headrace.pipeline.runtime.task import Task, TaskState
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.ids import changelog_topic, consumer_group
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
ABORT_PAUSE_SECONDS = 0.1
REPORT_SECONDS = 10.0
KEEP_SECONDS = 10.0
"""A task with timers commits at least so often, so that its changelog says until when it was run."""
FORGOTTEN_SECONDS = 20.0
"""A member whose tasks were taken, or that the group does not know, joins anew when nobody calls it for so long."""
LONGEST_POLL_MS = 86_400_000
POLL_GROWTH = 4
"""``max.poll.interval.ms`` grows so much when a turn was longer, up to a day: the step that took so long is repeated
once, not for ever.
"""
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
        """Tasks that run; others are on their way (attacher) or suspended."""
        self._suspended: dict[int, Task] = {}
        self._places: dict[Place, Task] = {}
        self._trouble: Exception | None = None
        self._counts: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._folded = self._commits = 0
        self._reported = time.monotonic()
        self._poll_ms = int(config.kafka.settings.get("max.poll.interval.ms", MAX_POLL_MS))
        self._revoked: float | None = None
        """When tasks were last revoked that ran, until some run again."""
        self._expelled: float | None = None
        """Since when this member has no word from the group, which took its tasks or does not know it (monotonic)."""

    def run(self) -> None:
        """Work until every task is finished or the process must stop.

        Raises Superseded, MissingTopic, and ConfigurationError for positions that do not fit. Whatever a stage raises
        outside ``process`` ends the worker too.
        """
        self._prepare()
        try:
            self._transaction = self._claim.take(back_off=0.0)
            try:
                self._members.join(SUB_TOPOLOGIES[self._sub_topology])
                while not self._stop.is_set() and not self._finished():
                    self._guarded(self._turn)
            finally:
                self._close()
        except (ProducerLost, TransactionAborted) as error:
            log.info("%s: stopped without its last commit: %s", self._sub_topology, error)

    # clients

    def _prepare(self) -> None:
        sub, connection = self._sub_topology, self._connection
        connection.wait_for_broker()
        self._counts = connection.list_run_topics()
        self._names = {topic: connection.topic(topic) for topic in self._counts}
        needed = (*SUB_TOPOLOGIES[sub], *(changelog_topic(sub, store) for store in STORES[sub]))
        self._presence = Presence(connection, self._counts)
        self._presence.refuse([topic for topic in needed if topic not in self._counts], "create the run's topics first")
        self._name = f"{sub}.{self._instance}"
        self._make_consumer()
        self._questions = Questions(
            connection, self._consumer, consumer_group(connection.run, sub), self._name, self._stop
        )
        self._claim = Claim(
            connection,
            sub,
            self._instance,
            self._counts,
            questions=self._questions,
            presence=self._presence,
            watchdog=self._watchdog,
            stop=self._stop,
            clock=self._clock,
        )
        self._frontier = Frontier(self._questions.ends, self._questions.newest, self._on_outage, self._clock)
        self._shelf = Shelf(connection, self._config, sub, self._instance, self._counts, self._questions, self._metrics)
        self._attacher = Attacher(
            connection, self._questions, self._shelf.copies, StageMetrics(self._metrics, sub), self._new_task
        )

    def _make_consumer(self) -> None:
        self._consumer = self._connection.consumer(
            self._instance,
            consumer_group(self._connection.run, self._sub_topology),
            group_instance_id=self._instance,
            enable_partition_eof=True,
            fetch_wait_max_ms=FETCH_WAIT_MS,
            max_poll_interval_ms=self._poll_ms,
        )
        self._members = Membership(self._connection, self._consumer, self._on_revoke, self._on_lost)

    def _new_task(
        self, number: int, places: tuple[Place, ...], stores: Mapping[str, OverlayStore] | None = None
    ) -> Task:
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
            stores=stores or self._shelf.stores_for(number),
        )

    def _write(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes | None]],
    ) -> None:
        name = self._names.get(topic) or self._connection.topic(topic)
        if partition >= self._counts.get(topic, 0):
            raise KafkaFailure(
                f"{self._name} writes to {name}[{partition}], which does not exist: the topic has "
                f"{self._counts.get(topic, 0)} partitions"
            )
        self._transaction.produce(name, value, partition, key, headers)

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
        except KafkaException as error:
            if not error_of(error).fatal():
                raise
            self._guarded(partial(self._rejoin, ConsumerLost(error_of(error).str())))

    def _turn(self) -> None:
        if self._members.given is not None:
            self._attach()
        elif self._expelled is not None and time.monotonic() - self._expelled > FORGOTTEN_SECONDS:
            raise ConsumerLost("the group has taken this member's tasks, or does not know it, and does not call it")
        if self._attacher.busy or self._shelf.held:
            self._take_up()
        try:
            self._read()
        except UnusableFlood:
            self._commit()
            raise
        if self._members.given is not None or self._trouble is not None:
            return
        tasks = self._tasks.values()
        at_work = time.thread_time()
        for task in tasks:
            task.fire_timers()
        now = time.monotonic()
        for task in tasks:
            if task.touched or task.acted <= now - TICK_SECONDS:
                task.act()
            if task.committed <= now - KEEP_SECONDS and task.next_due_ms() is not None:
                task.touched = True
        self._frontier.worked(time.thread_time() - at_work)
        self._commit()
        self._frontier.probe()
        self._report()

    def _read(self) -> None:
        """Fold records until nothing came for 2 ms or the turn is old or large enough."""
        poll, fold, now = self._consumer.poll, self._fold, time.monotonic
        message = poll(self._patience())
        if message is None:
            return
        began = now()
        limit = min(LONGEST_TURN_SECONDS, max(TURN_SECONDS, 10 * self._transaction.last_commit_seconds))
        records = size = 0
        heard = False
        while message is not None:
            if message.error() is None:
                fold(message)
                records += 1
                size += len(message)
                if records >= TURN_RECORDS or size >= TURN_BYTES:
                    break
            else:
                heard |= self._meet(message)
            if now() - began >= limit or self._members.given is not None:
                break
            message = poll(DRY_SECONDS)
        self._folded += records
        if heard or records:
            self._frontier.heard()

    def _patience(self) -> float:
        """How long the first poll of a turn may wait."""
        if self._attacher.busy:
            return 0.0
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

    def _meet(self, message: Message) -> bool:
        """What the consumer reports: the end of a partition (True: the broker answered), or an error."""
        error = message.error()
        if error is None or error.code() == KafkaError._PARTITION_EOF:
            self._frontier.read_to_end(self._place(message), message.offset() or 0)
            return True
        if error.code() == KafkaError._FATAL or error.fatal():
            raise ConsumerLost(error.str())
        if error.code() == KafkaError._MAX_POLL_EXCEEDED:
            # The same records would take as long again, and again end in an expulsion.
            self._poll_ms = min(LONGEST_POLL_MS, POLL_GROWTH * self._poll_ms)
            raise ConsumerLost(f"one turn took longer than max.poll.interval.ms; from now on {self._poll_ms} ms")
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            self._out_of_range(self._place(message), error.str())
        else:
            log.warning("%s: %s: %s", self._name, error.name(), error.str())
        return False

    def _place(self, message: Message) -> Place:
        return (message.topic() or "").removeprefix(f"{self._connection.run}."), message.partition() or 0

    def _out_of_range(self, place: Place, reason: str) -> None:
        """The broker has no such offset: read on if that was a passing state, else say what was lost."""
        topic, partition = place
        position = self._frontier.positions.get(place)
        if position is None:
            return
        ask = self._questions.patiently
        first = ask("first offsets", partial(self._connection.start_offsets, topic))[partition]
        end = ask("end offsets", partial(self._connection.end_offsets, topic, committed=False))[partition]
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
        mark = str(self._claim.mark)
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
        """Set out for the tasks whose partitions the group gave; those that were suspended come back first."""
        plan = tasks_of(self._sub_topology, self._members.given or [], self._counts)
        self._members.given = self._expelled = None
        elsewhere = [task for number, task in self._suspended.items() if number not in plan]
        back = {number: task for number, task in self._suspended.items() if number in plan}
        self._suspended = {}
        self._shelf.arrange(elsewhere, plan)
        self._attacher.begin(back.get(number) or self._new_task(number, places) for number, places in plan.items())
        log.info("%s: given tasks %s", self._name, sorted(plan) or "none")

    def _take_up(self) -> None:
        """Go on restoring; position and open what is ready, and leave the mark."""
        ready = self._attacher.step(others=bool(self._tasks))
        self._shelf.look()
        if not ready:
            return
        if not self._tasks:
            self._frontier.begin()
        for task, _ in ready:
            self._tasks[task.number] = task
        self._index()
        self._frontier.attach(dict(place for _, positions in ready for place in positions.items()))
        self._assign(self._frontier.positions)
        for task, _ in ready:
            if task.state is TaskState.SUSPENDED:
                task.resume()
            else:
                task.start()
            task.touched = True
        log.info("%s: runs tasks %s", self._name, sorted(self._tasks) or "none")
        self._commit()
        if self._revoked is not None:
            pause, self._revoked = time.monotonic() - self._revoked, None
            log.info("%s: the rebalance paused its tasks for %.2f s", self._name, pause)
            self._metrics.gauge("last_rebalance_seconds", pause, stage=self._sub_topology)

    def _index(self) -> None:
        self._places = {place: task for task in self._tasks.values() for place in task.places}

    def _drop_tasks(self) -> list[Task]:
        tasks = list(self._tasks.values())
        self._tasks = {}
        self._index()
        self._frontier.detach([place for task in tasks for place in task.places])
        return tasks

    def _on_revoke(self) -> None:
        """Nothing open survives a revocation; stores are kept in case the tasks come back.

        Every task takes part in the commit: the group refuses it when this member had lost its tasks before.
        """
        self._expelled = time.monotonic()
        if self._tasks:
            self._revoked = self._expelled
        for task in self._tasks.values():
            task.touched = True
        self._suspended |= {task.number: task for task in self._attacher.call_off()}
        try:
            self._commit()
        except (TransactionAborted, ProducerLost) as error:
            self._trouble = error if isinstance(error, ProducerLost) else None
            log.warning("%s: what was open at the revocation is undone: %s", self._name, error)
            self._close_tasks()
            return
        tasks = self._drop_tasks()
        if not self._stop.is_set():
            self._suspended |= {task.number: task for task in self._attacher.suspend(tasks)}

    def _on_lost(self) -> None:
        log.warning("%s: the group moved on without this member", self._name)
        self._expelled = time.monotonic()
        self._close_tasks()
        try:
            self._transaction.abort()
        except ProducerLost as error:
            self._trouble = error

    def _close_tasks(self) -> None:
        for task in [*self._attacher.call_off(), *self._drop_tasks(), *self._suspended.values()]:
            task.close()
        self._suspended = {}

    # faults

    def _start_over(self, error: TransactionAborted) -> None:
        """The transaction was undone: stages and positions go back to the last commit."""
        log.warning("%s: aborted and tried again: %s", self._name, error)
        self._metrics.count("transactions_aborted_total", stage=self._sub_topology)
        self._transaction.abort()
        if error.topics:
            self._presence.look()
        if error.membership:
            self._close_tasks()
            self._consumer.assign([])
            self._expelled = time.monotonic()
            return
        if any(task.state is not TaskState.RUNNING for task in self._tasks.values()):
            self._give_back()
            return
        self._stop.wait(ABORT_PAUSE_SECONDS)
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
        self._give_back()
        self._transaction = self._claim.take()
        log.info("%s: a new producer after %.1f s", self._name, time.monotonic() - start)

    def _give_back(self) -> None:
        """Close the tasks and attach them anew in the next turn."""
        held = [place for task in self._tasks.values() for place in task.places] + self._attacher.places()
        self._close_tasks()
        if held:
            self._consumer.assign([])
            self._members.given = held

    def _rejoin(self, error: ConsumerLost) -> None:
        """The consumer failed for good: a successor joined, or the cluster forgot this member over a restart."""
        log.warning("%s: consumer lost: %s", self._name, error)
        self._close_tasks()
        try:
            self._transaction.abort()
        except ProducerLost as lost:
            self._trouble = lost
        self._consumer.close()
        self._stop.wait(BACK_OFF_SECONDS)
        self._claim.refuse_successor()
        self._make_consumer()
        self._questions.consumer = self._consumer
        self._expelled = None
        self._members.join(SUB_TOPOLOGIES[self._sub_topology])

    def _on_outage(self, start_ms: int, end_ms: int) -> None:
        log.warning("%s: no broker for %.1f s; timers are moved", self._name, (end_ms - start_ms) / 1000)
        for task in self._tasks.values():
            task.shift_timers(start_ms, end_ms)

    # end

    def _finished(self) -> bool:
        waits = self._transaction.open or self._attacher.busy
        return bool(self._tasks) and not waits and all(t.finished() for t in self._tasks.values())

    def _report(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if now - self._reported < REPORT_SECONDS and not last:
            return
        paused = {place for task in self._tasks.values() for place in task.paused_places}
        positions = {place: o for place, o in self._frontier.positions.items() if place not in paused}
        lag = sum(max(0, self._questions.newest(place) - o) for place, o in positions.items())
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
        self._report(last=True)
        self._close_tasks()
        self._transaction.discard()
        try:
            if self._stop.is_set():
                self._members.leave()
            self._consumer.close()
        except KafkaException as error:
            log.info("%s: leaving the group: %s", self._name, error)
        self._shelf.close()
        self._questions.close()
