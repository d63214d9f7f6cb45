"""Rank 0's one transactional producer: Step, head pointer and consumed lane offsets in one transaction (protocol 8).

``open`` fences a predecessor and leaves this trainer's mark with the committed offsets. Who finds a later mark than its
own after losing its producer ends by ``Superseded``; else the broker only stood still, and a new producer goes on.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as installed_version
from typing import TypeVar

from confluent_kafka import KafkaException, TopicPartition

from headrace.connectors.kafka import Connection, Consumer
from headrace.connectors.kafka_errors import error_of, explain
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.marks import Mark
from headrace.connectors.transaction import (
    CALL_SECONDS,
    Face,
    ProducerLost,
    Transaction,
    TransactionAborted,
    Watchdog,
    face_of,
)
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.records import Head, Record, Resumed, Rollback, Step, Stop
from headrace.trainers.lanes import Stopped
from headrace.trainers.lineage import StepsSeen, seen_in

__all__ = ("StepLog",)

T = TypeVar("T")


class StepLog:
    """Writes to ``steps`` and ``deltas`` of one policy.

    consumer: one that is used for nothing else and reads nothing; its group takes the offsets of the lanes.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        policy: int,
        name: str,
        transactional_id: str,
        client_id: str,
        consumer: Consumer,
        stop: StopSignal,
    ) -> None:
        self._connection, self._policy, self._name, self._stop = connection, policy, name, stop
        self._consumer = consumer
        self._lanes = connection.topic(f"batches.{name}")
        self._id, self._client_id = transactional_id, client_id
        self._version = installed_version("headrace")
        self._watchdog = Watchdog(connection.answers)
        self._transaction: Transaction | None = None
        self._mark: Mark | None = None

    def open(self) -> None:
        """Fence a predecessor, sweep away what a broker forgot to abort, leave the mark. Raises Stopped, Superseded."""
        while True:
            try:
                self._begin_again()
                return
            except (ProducerLost, TransactionAborted) as error:
                self._wait_after(error)

    def _begin_again(self) -> None:
        """A producer that owns the transactional id."""
        if self._mark is not None:
            self._mark.refuse_successor([self._left()[0]])
        producer = self._connection.producer(self._client_id, self._id)
        transaction = Transaction(producer, self._watchdog, self._stop.is_set)
        transaction.initialise()
        places = [(self._connection.topic(topic), self._policy) for topic in ("steps", "deltas")]
        transaction.sweep(places, TopicPartition(self._lanes, 0, 0), self._consumer.consumer_group_metadata())
        left, offset = self._left()
        if self._mark is None:
            self._mark = Mark.next(self._id, [left], int(time.time() * 1000))
        self._mark.refuse_successor([left])
        place = TopicPartition(self._lanes, 0, max(0, offset), metadata=str(self._mark))
        transaction.commit([place], self._consumer.consumer_group_metadata())
        self._transaction = transaction

    def seen(self) -> StepsSeen:
        """What ``steps`` says of this policy, read to its end."""
        raws = self._connection.read_topic("steps", {self._policy: 0})
        return seen_in([record for raw in raws if (record := raw.decoded_if_ours()) is not None])

    def commit(self, records: Sequence[Record], offsets: Mapping[int, int]) -> None:
        """Write records and the offset of every lane in one transaction; waits while the broker is away.

        Raises Superseded when another trainer has taken over, Stopped.
        """
        left = list(records)
        while True:
            try:
                self._transact(left, offsets)
                return
            except TransactionAborted as error:
                self._wait_after(error)
            except ProducerLost as error:
                self._wait_after(error)
                self.open()
                left = self._unwritten(left)

    def _transact(self, records: Sequence[Record], offsets: Mapping[int, int]) -> None:
        if self._transaction is None:
            raise ProducerLost("no producer yet")
        for record in records:
            topic = "deltas" if isinstance(record, Head) else "steps"
            self._transaction.produce(
                self._connection.topic(topic),
                encode(record),
                self._policy,
                self._name.encode(),
                [*headers_of(record, self._connection.run, self._version)],
            )
        places = [TopicPartition(self._lanes, lane, at, metadata=str(self._mark)) for lane, at in offsets.items()]
        self._transaction.commit(places, self._consumer.consumer_group_metadata())

    def _unwritten(self, records: Sequence[Record]) -> list[Record]:
        """Without what a lost producer had committed after all."""
        seen = self.seen()

        def written(record: Record) -> bool:
            if isinstance(record, Step | Resumed):
                return record.version in seen.announced
            if isinstance(record, Rollback):
                return seen.lineage >= record.lineage
            return isinstance(record, Stop) and seen.stopped

        return [record for record in records if not written(record)]

    def _wait_after(self, error: Exception) -> None:
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {self._id}: {error}; again in 1 s\n")
        if self._stop.wait(1.0):
            raise Stopped(f"stopping: {self._stop.reason}") from error

    def _left(self) -> tuple[Mark | None, int]:
        """The mark and the offset that this group has committed for lane 0 (-1 or less: none)."""
        lane = TopicPartition(self._lanes, 0)
        (asked,) = self._patiently(lambda: self._consumer.committed([lane], timeout=CALL_SECONDS))
        return Mark.parse(asked.metadata), asked.offset

    def _patiently(self, call: Callable[[], T]) -> T:
        """Repeat a question while no broker answers it."""
        while True:
            try:
                return call()
            except KafkaException as failure:
                if face_of(error_of(failure)) is not Face.AGAIN:
                    raise explain(failure, "reading committed offsets", self._connection.bootstrap) from failure
                self._wait_after(failure)
