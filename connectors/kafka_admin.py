"""Topics of a run on a cluster: create what the map asks for, list, delete, and ask for offsets.

Functions over an admin client; names go in and come out without the run's prefix. Creation is idempotent, may race with
other processes, and refuses a topic that exists with another partition count.
"""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Literal, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic

from headrace.connectors.kafka_errors import KafkaFailure, WrongPartitionCount
from headrace.schemas.ids import topic_name, unprefixed
from headrace.schemas.topics import settings_of

__all__ = ("REQUEST_SECONDS", "answer_of", "delete_run_topics", "ensure_topics", "list_run_topics", "offsets_at")

T = TypeVar("T")
REQUEST_SECONDS = 15.0
"""Time for one request to the cluster."""
_SETTLE_SECONDS = 30.0
"""Time in which created topics must have leaders, and deleted ones be gone."""
_LEAVE_SECONDS = 12.0
"""Time in which members that ended lose their place in a group (the session of static ones is 6 s)."""
_MOVING = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.FENCED_LEADER_EPOCH,
    }
)
"""A partition whose leader is not in place yet: ask again."""


def answer_of(future: "Future[T]") -> T:
    """The answer to a request of an admin client. Raises KafkaException, also for one that never ends."""
    try:
        return future.result(REQUEST_SECONDS + 1)
    except TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None


def list_run_topics(admin: AdminClient, run: str) -> dict[str, int]:
    """Partition counts of the run's topics, by name without prefix. Raises KafkaException."""
    prefix = topic_name(run, "")
    topics = admin.list_topics(timeout=REQUEST_SECONDS).topics
    return {unprefixed(run, name): len(t.partitions) for name, t in topics.items() if name.startswith(prefix)}


def ensure_topics(admin: AdminClient, run: str, counts: Mapping[str, int], replication: int) -> list[str]:
    """Create what is missing with the settings of ``topics.settings_of``; returns the created names.

    Raises WrongPartitionCount, KafkaException.
    """
    have = list_run_topics(admin, run)
    _refuse_other_counts(run, counts, have)
    missing = [name for name in counts if name not in have]
    if missing:
        futures = admin.create_topics(
            [NewTopic(topic_name(run, n), counts[n], replication, config=settings_of(n)) for n in missing],
            request_timeout=REQUEST_SECONDS,
        )
        for future in futures.values():
            try:
                answer_of(future)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
    _wait_for_leaders(admin, run, counts)
    return missing


def _refuse_other_counts(run: str, counts: Mapping[str, int], have: Mapping[str, int]) -> None:
    wrong = [
        f"{topic_name(run, n)} has {have[n]}, wanted {c}" for n, c in counts.items() if have.get(n) not in (None, 0, c)
    ]
    if wrong:
        raise WrongPartitionCount(
            f"topics exist with other partition counts: {'; '.join(wrong)}. Counts are fixed when a run is created: "
            "take the settings it was created with, another run id, or delete the run's topics"
        )


def _wait_for_leaders(admin: AdminClient, run: str, counts: Mapping[str, int]) -> None:
    end = time.monotonic() + _SETTLE_SECONDS
    while True:
        topics = admin.list_topics(timeout=REQUEST_SECONDS).topics
        pending = [
            n
            for n, count in counts.items()
            if (t := topics.get(topic_name(run, n))) is None
            or len(t.partitions) < count
            or any(p.leader < 0 for p in t.partitions.values())
        ]
        if not pending:
            _refuse_other_counts(run, counts, list_run_topics(admin, run))
            places = [(name, p) for name, count in counts.items() for p in range(count)]
            offsets_at(admin, run, places, "latest", committed=False)
            return
        if time.monotonic() > end:
            raise KafkaFailure(
                f"topics {', '.join(topic_name(run, n) for n in pending)} have no leader after "
                f"{_SETTLE_SECONDS:g} s; is kafka.replication_factor above the number of brokers?"
            )
        time.sleep(0.05)


def delete_run_topics(admin: AdminClient, run: str) -> list[str]:
    """Delete the run's topics and consumer groups, waiting until the topics are gone. Raises KafkaException."""
    names = sorted(list_run_topics(admin, run))
    if names:
        topics = [topic_name(run, name) for name in names]
        for future in admin.delete_topics(topics, request_timeout=REQUEST_SECONDS).values():
            try:
                answer_of(future)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
    end = time.monotonic() + _SETTLE_SECONDS
    while list_run_topics(admin, run) and time.monotonic() < end:
        time.sleep(0.05)
    _delete_groups(admin, run)
    return names


def _delete_groups(admin: AdminClient, run: str) -> None:
    """Offsets of deleted topics would send a run of the same name to places that do not exist."""
    prefix = topic_name(run, "")
    listed = answer_of(admin.list_consumer_groups(request_timeout=REQUEST_SECONDS))
    groups = [g.group_id for g in listed.valid if g.group_id.startswith(prefix)]
    if not groups:
        return
    end = time.monotonic() + _LEAVE_SECONDS
    while groups:
        for group, future in admin.delete_consumer_groups(groups, request_timeout=REQUEST_SECONDS).items():
            try:
                answer_of(future)
            except KafkaException as error:
                code = error.args[0].code()
                if code == KafkaError.NON_EMPTY_GROUP and time.monotonic() < end:
                    continue
                if code != KafkaError.GROUP_ID_NOT_FOUND:
                    raise
            groups = [g for g in groups if g != group]
        if groups:
            time.sleep(0.2)


def offsets_at(
    admin: AdminClient,
    run: str,
    places: Iterable[tuple[str, int]],
    which: Literal["earliest", "latest"] | int,
    *,
    committed: bool,
) -> dict[tuple[str, int], int]:
    """Offsets of partitions in one request: first, end (with ``committed`` the last stable one), or by time.

    which: for a time in milliseconds since the epoch the first record that is not older, -1 when there is none.
    Repeats while a leader moves or is not known yet. Raises KafkaException.
    """
    spec: OffsetSpec
    if isinstance(which, int):
        spec = OffsetSpec.for_timestamp(which)
    else:
        spec = OffsetSpec.earliest() if which == "earliest" else OffsetSpec.latest()  # type: ignore[no-untyped-call]
    wanted = {TopicPartition(topic_name(run, topic), p): spec for topic, p in places}
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    out: dict[tuple[str, int], int] = {}
    end = time.monotonic() + _SETTLE_SECONDS
    while wanted:
        futures = admin.list_offsets(wanted, isolation_level=level, request_timeout=REQUEST_SECONDS)
        for place, future in futures.items():
            try:
                offset = answer_of(future).offset
            except KafkaException as error:
                if error.args[0].code() not in _MOVING or time.monotonic() > end:
                    raise
                continue
            out[unprefixed(run, place.topic), place.partition] = offset
            wanted = {p: spec for p in wanted if (p.topic, p.partition) != (place.topic, place.partition)}
        if wanted:
            time.sleep(0.1)
            admin.list_topics(timeout=REQUEST_SECONDS)  # the client asks the leaders that it knows, right or not
    return out
