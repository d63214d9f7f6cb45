"""What a worker asks the cluster beside its stream of records: ends of partitions, marks, committed positions.

Questions go through a client of their own, because on the consumer's connection they would wait behind its long poll.
A question that must have an answer is repeated until the broker is back or the process must stop.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import OFFSET_END, KafkaException, TopicPartition

from headrace.connectors.kafka import Connection, Consumer
from headrace.connectors.kafka_errors import KafkaFailure, MissingTopic
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.marks import Mark
from headrace.connectors.transaction import CALL_SECONDS, ProducerLost
from headrace.pipeline.runtime.frontier import Place
from headrace.schemas.ids import unprefixed

__all__ = ("Committed", "Questions", "Unanswered")

log = logging.getLogger(__name__)

T = TypeVar("T")
Committed = tuple[int, Mark | None]
"""A committed offset, -1 for none, and the mark of the process of ours that committed it."""
_ASK_SECONDS = 1.0
_RENEW_SECONDS = 0.3


class Unanswered(Exception):
    """The cluster had no answer within the time that the question may take."""


class Questions:
    """Questions of one worker about its group ``group``; ``consumer`` is the one that reads the inputs."""

    def __init__(self, connection: Connection, consumer: Consumer, group: str, name: str, stop: StopSignal) -> None:
        self._connection = connection
        self.consumer = consumer
        self._asker = connection.consumer(f"{name}.ask", group)
        self._stop = stop
        self._partitions: dict[Place, TopicPartition] = {}

    def ends(self, places: Sequence[Place]) -> dict[Place, int] | None:
        """Last stable offsets of places in one request, None when a leader of theirs does not answer within a second.

        Raises ProducerLost when the process must stop while it does not answer.
        """
        wanted = [TopicPartition(self._connection.topic(t), p, OFFSET_END) for t, p in places]
        try:
            found = self._asker.offsets_for_times(wanted, timeout=_ASK_SECONDS)
        except KafkaException:
            found = []
        if not found or any(p.error is not None or p.offset < 0 for p in found):
            if self._stop.is_set():
                raise ProducerLost("stopped while the broker was away")
            self._renew({topic for topic, _ in places})
            return None
        return {(unprefixed(self._connection.run, p.topic), p.partition): p.offset for p in found}

    def _renew(self, topics: Collection[str]) -> None:
        """Learn anew who leads these topics: the client asks the leaders that it knows for minutes, dead or not."""
        for topic in topics:
            with suppress(KafkaException):
                self._asker.list_topics(self._connection.topic(topic), timeout=_RENEW_SECONDS)

    def all_ends(self, topic: str) -> dict[int, int]:
        """Newest end of each partition of a topic, open transactions included; waits while the broker is away.

        Raises ProducerLost when the process must stop first.
        """
        ask = partial(self._connection.end_offsets, topic, committed=False)
        return self.patiently(f"the ends of {topic}", ask)

    def first(self, place: Place) -> int:
        """First offset that a partition holds; waits as ``all_ends`` does."""
        return self.patiently(f"the start of {place[0]}", partial(self._connection.start_offsets, place[0]))[place[1]]

    def outsider(self) -> Any:
        """Metadata of the group for who is no member of it: never fences, is never fenced."""
        return self._asker.consumer_group_metadata()

    def newest(self, place: Place) -> int:
        """End of a place in the newest fetch (high watermark), 0 when there was none."""
        partition = self._partitions.get(place)
        if partition is None:
            partition = self._partitions[place] = TopicPartition(self._connection.topic(place[0]), place[1])
        marks = self.consumer.get_watermark_offsets(partition, cached=True)
        return max(0, marks[1]) if marks else 0

    def committed(self, places: Sequence[Place], limit: float = math.inf) -> dict[Place, Committed]:
        """The group's committed offset (-1 for none) and mark of each place; waits out open transactions.

        Raises Unanswered when that takes longer than ``limit`` seconds.
        """
        return self.patiently("the group's committed offsets", lambda: self._committed(places, CALL_SECONDS), limit)

    def committed_within(self, places: Sequence[Place], seconds: float) -> dict[Place, Committed] | None:
        """As ``committed``, but None when an open transaction or the broker keeps the offsets back."""
        try:
            return self._committed(places, seconds)
        except KafkaException as error:
            log.info("the group's committed offsets: %s; again", error)
            return None

    def _committed(self, places: Sequence[Place], seconds: float) -> dict[Place, Committed]:
        wanted = [TopicPartition(self._connection.topic(t), p) for t, p in places]
        out: dict[Place, Committed] = {}
        for p in self._asker.committed(wanted, timeout=seconds):
            if p.error is not None:
                raise KafkaException(p.error)
            out[unprefixed(self._connection.run, p.topic), p.partition] = (max(-1, p.offset), Mark.parse(p.metadata))
        return out

    def marks(self, places: Sequence[Place], limit: float = math.inf) -> list[Mark | None]:
        """The marks in the committed offsets of places. Raises Unanswered after ``limit`` seconds without an answer."""
        return [mark for _, mark in self.committed(places, limit).values()]

    def patiently(self, what: str, ask: Callable[[], T], limit: float = math.inf) -> T:
        """Ask until there is an answer, also while a broker that starts again does not know the topics yet.

        Raises ProducerLost when the process must stop first, Unanswered after ``limit`` seconds.
        """
        began = time.monotonic()
        while True:
            try:
                return ask()
            except (KafkaException, KafkaFailure, MissingTopic) as error:
                log.info("asking for %s: %s; again", what, error)
                if self._stop.wait(0.3):
                    raise ProducerLost(f"stopped while asking for {what}") from error
                if time.monotonic() - began > limit:
                    raise Unanswered(f"no answer about {what} for {limit:.0f} s: {error}") from error

    def close(self) -> None:
        """Close the client."""
        self._asker.close()
