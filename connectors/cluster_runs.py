"""All runs on a cluster: which there are, whether anybody works on one, and how long nothing has happened.

Goes in: an address; comes out: a row for each run id that has topics there. Nothing is changed here.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from confluent_kafka import ConsumerGroupState, ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin._group import ConsumerGroupListing

from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_admin import REQUEST_SECONDS, answer_of
from headrace.connectors.kafka_errors import explain
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.ids import check_run_id
from headrace.schemas.topics import spec_of

__all__ = ("RunTopics", "busy_groups", "has_record_since", "positions_of", "runs_on")

_IDLE = frozenset({ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD})


@dataclass(frozen=True, slots=True)
class RunTopics:
    """A run id with the names of its topics (without prefix) and their partition counts."""

    run: str
    topics: dict[str, int]


def runs_on(connection: Connection) -> Iterator[RunTopics]:
    """Every run that has topics on the cluster of ``connection`` (of any run). Raises KafkaFailure."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    try:
        topics = connection.admin().list_topics(timeout=REQUEST_SECONDS).topics
    except KafkaException as error:
        raise explain(error, "listing topics", connection.bootstrap) from error
    for name, topic in topics.items():
        run, _, inner = name.partition(".")
        if inner and _is_ours(run, inner):
            found[run][inner] = len(topic.partitions)
    for run in sorted(found):
        yield RunTopics(run, found[run])


def _is_ours(run: str, topic: str) -> bool:
    """Whether a topic's name is one that a run of ours has."""
    try:
        check_run_id(run)
        if not topic.endswith("-changelog"):
            spec_of(topic)
    except (ConfigurationError, KeyError):
        return False
    return True


def busy_groups(connection: Connection) -> list[str]:
    """Consumer groups of the connection's run that have members. Raises KafkaFailure."""
    return sorted(group.group_id for group in _groups(connection) if group.state not in _IDLE)


def positions_of(connection: Connection) -> dict[str, list[TopicPartition]]:
    """What every consumer group of the connection's run has committed, by the group's id. Raises KafkaFailure."""
    admin, out = connection.admin(), {}
    for group in sorted(group.group_id for group in _groups(connection)):
        wanted = [ConsumerGroupTopicPartitions(group)]
        try:
            asked = admin.list_consumer_group_offsets(wanted, require_stable=False, request_timeout=REQUEST_SECONDS)
            out[group] = answer_of(asked[group]).topic_partitions
        except KafkaException as error:
            raise explain(error, f"asking for the positions of {group}", connection.bootstrap) from error
    return out


def _groups(connection: Connection) -> list[ConsumerGroupListing]:
    until = time.monotonic() + REQUEST_SECONDS
    while True:
        try:
            listed = answer_of(connection.admin().list_consumer_groups(request_timeout=REQUEST_SECONDS))
            if not listed.errors:  # else a node that has just started knows none of its groups yet
                break
            if time.monotonic() > until:
                raise listed.errors[0]
        except KafkaException as error:
            raise explain(error, "listing consumer groups", connection.bootstrap) from error
        time.sleep(0.2)
    return [group for group in listed.valid if group.group_id.startswith(connection.topic(""))]


def has_record_since(connection: Connection, topics: dict[str, int], since_ms: int) -> bool:
    """True when one of the run's partitions has a record that is not older than ``since_ms``.

    Such records are heartbeats of workers too: a run in which anybody is alive has one every two seconds. Raises
    KafkaFailure.
    """
    wanted = [TopicPartition(connection.topic(t), p, since_ms) for t, count in topics.items() for p in range(count)]
    consumer = connection.consumer("janitor", isolation_level="read_uncommitted")
    try:
        found = consumer.offsets_for_times(wanted, timeout=REQUEST_SECONDS)
    except KafkaException as error:
        raise explain(error, "asking for the newest records", connection.bootstrap) from error
    finally:
        consumer.close()
    failed = next((place for place in found if place.error is not None), None)
    if failed is not None:
        raise explain(
            KafkaException(failed.error), f"asking for the newest record of {failed.topic}", connection.bootstrap
        )
    return any(place.offset >= 0 for place in found)
