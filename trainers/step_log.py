"""Rank 0's one transactional producer: Step, head pointer and consumed lane offsets in one transaction (protocol 8).

``open`` fences a predecessor, so whoever is fenced ends by ``Superseded``. Each offset commit carries this trainer's
incarnation number; a lost producer looks at it to tell a successor from a broker that stood still.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as installed_version
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from headrace.connectors.kafka import Connection, Consumer, Producer
from headrace.connectors.kafka_errors import KafkaFailure, error_of, explain
from headrace.connectors.lifetime import StopSignal
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.errors import Superseded
from headrace.schemas.records import Head, Record
from headrace.trainers.lanes import Stopped
from headrace.trainers.lineage import StepsSeen, seen_in

__all__ = ("StepLog",)

T = TypeVar("T")
_TIMEOUT = 10.0
"""Seconds of one transactional call (transaction.timeout.ms is 10 s)."""
_LOST = frozenset(
    {
        KafkaError._FENCED,
        KafkaError._FATAL,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_TXN_STATE,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
    }
)
_REPEATABLE = frozenset(
    {
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError.CONCURRENT_TRANSACTIONS,
    }
)
_INCARNATION = re.compile(r"incarnation=(\d+)")


class StepLog:
    """Writes to ``steps`` and ``deltas`` of one policy.

    consumer: this trainer's assign-only consumer, whose group takes the offsets of ``lane_topic``.
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
        self._lane_topic = f"batches.{name}"
        self._id, self._client_id = transactional_id, client_id
        self._version = installed_version("headrace")
        self._producer: Producer | None = None
        self._incarnation = 0

    def open(self) -> None:
        """Fence a predecessor, then sweep away what a broker forgot to abort. Raises Stopped, Superseded."""
        self._producer = self._connection.producer(self._client_id, self._id)
        self._repeated(lambda: self._live.init_transactions(_TIMEOUT), "init_transactions")
        self._incarnation = self._committed_incarnation() + 1
        self._live.begin_transaction()
        for topic in ("steps", "deltas"):
            self._connection.produce(self._live, topic, b"", partition=self._policy)
        self._repeated(lambda: self._send_offsets({0: 0}), "send_offsets")
        self._abort()

    @property
    def _live(self) -> Producer:
        if self._producer is None:
            raise Superseded("this trainer's producer was given up")
        return self._producer

    def seen(self) -> StepsSeen:
        """What ``steps`` says of this policy, read to its end."""
        raws = self._connection.read_topic("steps", {self._policy: 0})
        return seen_in([raw.decoded() for raw in raws])

    def commit(self, records: Sequence[Record], offsets: Mapping[int, int]) -> None:
        """Write records and the offset of every lane in one transaction; waits while the broker is away.

        Raises Superseded when another trainer has taken over, KafkaFailure when the producer is lost otherwise (a
        restart goes on from the checkpoint), Stopped.
        """
        while True:
            try:
                self._transact(records, offsets)
                return
            except KafkaException as failure:
                error = error_of(failure)
                if error.code() in _LOST or error.fatal():
                    raise self._lost(error) from failure
                if not error.txn_requires_abort():
                    raise explain(failure, "committing a step", self._connection.bootstrap) from failure
                self._abort()
                self._pause()

    def _transact(self, records: Sequence[Record], offsets: Mapping[int, int]) -> None:
        self._live.begin_transaction()
        for record in records:
            topic = "deltas" if isinstance(record, Head) else "steps"
            self._connection.produce(
                self._live,
                topic,
                encode(record),
                partition=self._policy,
                key=self._name.encode(),
                headers=headers_of(record, self._connection.run, self._version),
            )
        self._repeated(lambda: self._send_offsets(offsets), "send_offsets")
        self._repeated(lambda: self._live.commit_transaction(_TIMEOUT), "commit_transaction")

    def _send_offsets(self, offsets: Mapping[int, int]) -> None:
        note = f"incarnation={self._incarnation}"
        places = [
            TopicPartition(self._connection.topic(self._lane_topic), lane, at, metadata=note)
            for lane, at in offsets.items()
        ]
        self._live.send_offsets_to_transaction(places, self._consumer.consumer_group_metadata(), _TIMEOUT)

    def _abort(self) -> None:
        try:
            self._repeated(lambda: self._live.abort_transaction(_TIMEOUT), "abort_transaction")
        except KafkaException as failure:
            raise self._lost(error_of(failure)) from failure

    def _repeated(self, call: Callable[[], T], what: str) -> T:
        """Repeat a call while it fails for want of a broker."""
        while True:
            try:
                return call()
            except KafkaException as failure:
                error = error_of(failure)
                self._live.errors.raise_refused(self._connection.bootstrap)
                if error.fatal() or error.txn_requires_abort():
                    raise
                if not error.retriable() and error.code() not in _REPEATABLE:
                    raise explain(failure, what, self._connection.bootstrap, self._live.errors) from failure
                self._pause()

    def _pause(self) -> None:
        if self._stop.wait(0.2):
            raise Stopped(f"stopping: {self._stop.reason}")

    def _lost(self, error: KafkaError) -> Exception:
        """The exception for a lost producer: superseded when a larger incarnation has committed, else start again."""
        self._producer = None
        reason = f"{error.name()}: {error.str()}"
        time.sleep(1.0)
        if self._committed_incarnation() > self._incarnation:
            return Superseded(f"another trainer has taken over {self._id} ({reason})")
        return KafkaFailure(
            f"the producer {self._id} is lost ({reason}) and nobody took over: the broker stood still longer than the "
            "transaction timeout; start again, training resumes from the checkpoint"
        )

    def _committed_incarnation(self) -> int:
        """The largest incarnation among this trainer's committed offsets, 0 without any."""
        place = TopicPartition(self._connection.topic(self._lane_topic), 0)
        committed = self._repeated_read(lambda: self._consumer.committed([place], timeout=_TIMEOUT))
        found = [_INCARNATION.search(entry.metadata or "") for entry in committed]
        return max((int(match[1]) for match in found if match), default=0)

    def _repeated_read(self, call: Callable[[], T]) -> T:
        while True:
            try:
                return call()
            except KafkaException as failure:
                error = error_of(failure)
                if not error.retriable() and error.code() not in _REPEATABLE:
                    raise explain(failure, "reading committed offsets", self._connection.bootstrap) from failure
                self._pause()
