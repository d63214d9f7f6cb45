"""Records of a topic in the order of their times: those that are there, or those that come.

In: a connection, a topic and a place to begin; out: raw records, and their form as JSON data.
"""

import heapq
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.pipeline.cli.reading import abbreviated
from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.connectors.kafka import Connection, RawRecord

__all__ = ("as_object", "coming_records", "kept_records")


def kept_records(connection: "Connection", topic: str, offset: int, partition: int) -> Iterator["RawRecord"]:
    """What a topic holds from ``offset`` of each partition (below 0: from its end); ``partition`` -1 is all of them.

    Each partition is read on its own, so that none hides another's. Raises ConfigurationError for a partition that the
    topic does not have.
    """
    starts = _starts(connection, topic, offset, partition)
    end = connection.end_offsets(topic)
    streams = [connection.read_topic(topic, {p: at}) for p, at in starts.items() if at < end[p]]
    return heapq.merge(*streams, key=lambda raw: raw.timestamp_ms)


def coming_records(
    connection: "Connection", topic: str, offset: int, partition: int, seconds: float
) -> Iterator["RawRecord"]:
    """What is committed to a topic from ``offset`` on, as it comes, for ``seconds`` (0: without an end).

    Raises ConfigurationError for a partition that the topic does not have, and what the client reports.
    """
    from confluent_kafka import KafkaException, TopicPartition

    from headrace.connectors.kafka import RawRecord
    from headrace.connectors.kafka_errors import explain

    starts = _starts(connection, topic, offset, partition)
    until = time.monotonic() + seconds if seconds else float("inf")
    consumer = connection.consumer(f"tail.{topic}", fetch_wait_max_ms=100)
    try:
        consumer.assign([TopicPartition(connection.topic(topic), p, at) for p, at in sorted(starts.items())])
        while time.monotonic() < until:
            message = consumer.poll(min(0.2, max(0.0, until - time.monotonic())))
            if message is None:
                continue
            error = message.error()
            if error is not None:
                raise explain(KafkaException(error), f"reading {connection.topic(topic)}", connection.bootstrap)
            yield RawRecord.of(message, connection.run)
    finally:
        consumer.close()


def _starts(connection: "Connection", topic: str, offset: int, partition: int) -> dict[int, int]:
    first, end = connection.start_offsets(topic), connection.end_offsets(topic)
    wanted = [p for p in sorted(end) if partition in (-1, p)]
    if not wanted:
        raise ConfigurationError(f"{topic} has the partitions 0 to {len(end) - 1}, not {partition}")
    return {p: min(end[p], max(first[p], end[p] + offset if offset < 0 else offset)) for p in wanted}


def as_object(raw: "RawRecord", full: bool) -> dict[str, object]:
    """A record as JSON data: its place, time, key, headers, and its value or why it cannot be decoded."""
    from headrace.schemas.codec import to_plain
    from headrace.schemas.errors import UndecodableRecord

    text = {name: (value or b"").decode("utf-8", "backslashreplace") for name, value in raw.headers}
    out: dict[str, object] = {
        "topic": raw.topic, "partition": raw.partition, "offset": raw.offset, "timestamp_ms": raw.timestamp_ms,
        "key": (raw.key or b"").decode("utf-8", "backslashreplace"), "headers": text,
    }  # fmt: skip
    try:
        record = raw.decoded()
    except UndecodableRecord as error:
        return {**out, "error": str(error)}
    return {**out, "record": type(record).__name__, "value": abbreviated(to_plain(record), full)}
