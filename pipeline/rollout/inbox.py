"""The worker's inbox: one partition of ``tasks``, read by ``assign()`` from where it ended when the worker started.

Goes in: the worker's name and incarnation; comes out: its records in order. Tasks of another worker (inboxes are shared
by hash) or of another incarnation are left out, and ``next_sequence`` is what Demand echoes (protocol 5).
"""

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from headrace.connectors.kafka import Connection, RawRecord
from headrace.connectors.kafka_errors import KafkaFailure
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.ids import inbox_of
from headrace.schemas.parts import Source
from headrace.schemas.records import Cancel, Record, Resume, Stop, Suspend, Task

__all__ = ("Inbox",)

_PASSING = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._PARTITION_EOF, KafkaError._TIMED_OUT,
        KafkaError._RESOLVE, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT, KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.BROKER_NOT_AVAILABLE,
    }
)  # fmt: skip
"""Errors that the client recovers from by itself."""


class Inbox:
    """Reads the records for one incarnation of a worker. The end offset is taken when it is made.

    Raises MissingTopic, and what the connection raises when no broker answers.
    """

    def __init__(self, connection: Connection, worker: str, incarnation: int) -> None:
        ends = connection.end_offsets("tasks")
        self.partition = inbox_of(worker, len(ends))
        self.next_sequence = 0
        """Sequence number of the next Task that will be read."""
        self.undecodable: list[tuple[RawRecord, UndecodableRecord]] = []
        """Records that could not be read, for the owner to name in dead letters."""
        self._worker = worker
        self._incarnation = incarnation
        self._run = connection.run
        self._consumer = connection.consumer(worker, fetch_wait_max_ms=500)
        self._consumer.assign([TopicPartition(connection.topic("tasks"), self.partition, ends[self.partition])])

    def read(self, timeout: float, most: int = 500) -> list[tuple[Source, Record]]:
        """What has come, waiting up to ``timeout`` seconds for the first record.

        Raises KafkaFailure when the position is lost (the records were deleted); a new incarnation starts afresh.
        """
        out: list[tuple[Source, Record]] = []
        message = self._consumer.poll(timeout)
        while message is not None:
            error = message.error()
            if error is not None:
                if error.code() not in _PASSING:
                    raise KafkaFailure(
                        f"inbox {message.topic()}[{self.partition}] of {self._worker} cannot be read on: "
                        f"{KafkaException(error)}; restart the worker"
                    )
            else:
                self._take(RawRecord.of(message, self._run), out)
            if len(out) >= most:
                break
            message = self._consumer.poll(0)
        return out

    def renew(self, incarnation: int) -> None:
        """Read on for another incarnation of the worker: tasks of the one before are left out from now on."""
        self._incarnation = incarnation

    def close(self) -> None:
        """Leave the partition."""
        self._consumer.close()

    def _take(self, raw: RawRecord, out: list[tuple[Source, Record]]) -> None:
        try:
            record = raw.decoded()
        except UndecodableRecord as error:
            self.undecodable.append((raw, error))
            return
        if isinstance(record, Task | Cancel):
            if record.worker != self._worker or record.incarnation != self._incarnation:
                return
            if isinstance(record, Task):
                if record.sequence < self.next_sequence:
                    return
                self.next_sequence = record.sequence + 1
        elif isinstance(record, Suspend | Resume):
            if record.worker != self._worker:
                return
        elif not isinstance(record, Stop):
            return
        out.append((raw.source, record))
