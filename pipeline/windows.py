"""Reads many short stretches of a run's topics through one client.

In: a connection, and stretches by time or offsets; out: raw records. A client and its metadata cost more than the few
hundred records that such a stretch has.
"""

import time
from collections.abc import Iterator, Mapping
from types import TracebackType

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from headrace.connectors.kafka import Connection, RawRecord
from headrace.connectors.kafka_errors import explain

__all__ = ("Windows",)

_SECONDS = 30.0


class Windows:
    """One reader of committed records, used as a context; times are milliseconds since the epoch."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._consumer = connection.consumer("windows", enable_partition_eof=True, fetch_wait_max_ms=10)
        self._ends: dict[str, dict[int, int]] = {}

    def __enter__(self) -> "Windows":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._consumer.close()

    def ends(self, topic: str) -> dict[int, int]:
        """End offsets of a topic as first asked for."""
        if topic not in self._ends:
            self._ends[topic] = self._connection.end_offsets(topic)
        return self._ends[topic]

    def since(self, topic: str, time_ms: int) -> dict[int, int]:
        """Offset of the first record of each partition that is not older, or its end."""
        ends, name = self.ends(topic), self._connection.topic(topic)
        asked = [TopicPartition(name, p, max(0, time_ms)) for p in ends]
        try:
            found = self._consumer.offsets_for_times(asked, timeout=_SECONDS)
        except KafkaException as error:
            raise explain(error, f"asking {name} for offsets by time", self._connection.bootstrap) from error
        return {t.partition: t.offset if 0 <= t.offset < ends[t.partition] else ends[t.partition] for t in found}

    def read(self, topic: str, start: Mapping[int, int], until: Mapping[int, int] | None = None) -> Iterator[RawRecord]:
        """Records from ``start`` of each partition to before ``until``, or to the end. One stretch at a time."""
        name, ends = self._connection.topic(topic), self.ends(topic)
        stop = {p: min(ends[p], until.get(p, ends[p]) if until is not None else ends[p]) for p in start}
        left = {p for p, at in start.items() if at < stop[p]}
        if not left:
            return
        self._consumer.assign([TopicPartition(name, p, start[p]) for p in sorted(left)])
        quiet = time.monotonic()
        while left:
            message = self._consumer.poll(0.2)
            if message is None:
                if time.monotonic() - quiet > _SECONDS:
                    lost = KafkaException(KafkaError(KafkaError._TIMED_OUT))
                    raise explain(lost, f"reading {name}", self._connection.bootstrap)
                continue
            quiet = time.monotonic()
            partition, error = message.partition() or 0, message.error()
            if error is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise explain(KafkaException(error), f"reading {name}", self._connection.bootstrap)
                left.discard(partition)
                continue
            offset = message.offset() or 0
            if offset + 1 >= stop[partition]:
                left.discard(partition)
                if left:
                    self._consumer.incremental_unassign([TopicPartition(name, partition)])
            if offset < stop[partition]:
                yield RawRecord.of(message, self._connection.run)
