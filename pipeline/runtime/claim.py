"""A worker's claim to its transactional id: a producer that fenced its predecessor, a sweep, and a mark (protocol 7).

``take`` makes the claim at start and again after a producer was lost; ``refuse_successor`` ends a process whose claim a
later process of the same instance has taken.
"""

import logging
import zlib
from collections.abc import Callable, Mapping

from confluent_kafka import TopicPartition

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.marks import Mark
from headrace.connectors.transaction import ProducerLost, Transaction, TransactionAborted, Watchdog
from headrace.pipeline.runtime.assignment import input_places, output_places
from headrace.pipeline.runtime.frontier import Place
from headrace.pipeline.runtime.presence import Presence
from headrace.pipeline.runtime.questions import Questions, Unanswered
from headrace.schemas.ids import changelog_topic, transactional_id
from headrace.schemas.topics import STORES

__all__ = ("BACK_OFF_SECONDS", "Claim")

log = logging.getLogger(__name__)

BACK_OFF_SECONDS = 1.0
"""A successor gets this time to leave its mark before a lost producer is replaced."""
PENDING_SECONDS = 10.0
"""As long as a transaction may stay open: offsets that are still pending then end with the sweep only."""


class Claim:
    """The identity of one worker on the cluster."""

    def __init__(
        self,
        connection: Connection,
        sub_topology: str,
        instance: str,
        counts: Mapping[str, int],
        *,
        questions: Questions,
        presence: Presence,
        watchdog: Watchdog,
        stop: StopSignal,
        clock: Callable[[], int],
    ) -> None:
        self.name = f"{sub_topology}.{instance}"
        self.mark: Mark | None = None
        """Who this process is; None before the first claim."""
        self._connection = connection
        self._instance = instance
        self._transactional_id = transactional_id(connection.run, sub_topology, instance)
        self._questions = questions
        self._presence = presence
        self._watchdog = watchdog
        self._stop = stop
        self._clock = clock
        self._inputs = input_places(sub_topology, counts)
        self._outputs = output_places(sub_topology, counts)
        topic = changelog_topic(sub_topology, STORES[sub_topology][0])
        self._own_place: Place = (topic, zlib.crc32(instance.encode()) % counts[topic])
        """Where this instance leaves its mark before it has any task: a place that no group reads."""

    def take(self, back_off: float = BACK_OFF_SECONDS) -> Transaction:
        """A producer that owns the transactional id: init, sweep, marks read, own mark left.

        Waits ``back_off`` seconds first. Raises Superseded when another process of this instance took over,
        MissingTopic when topics were deleted, ProducerLost or TransactionAborted when the process must stop.
        """
        while True:
            if back_off:
                self._stop.wait(back_off)
                self.refuse_successor()
            transaction = Transaction(
                self._connection.producer(self.name, self._transactional_id), self._watchdog, self._stop.is_set
            )
            try:
                transaction.initialise()
                self._sweep(transaction)
                marks = self._questions.marks([*self._inputs, self._own_place])
                if self.mark is None:
                    self.mark = Mark.next(self._instance, marks, self._clock())
                self.mark.refuse_successor(marks)
                transaction.commit([self._at(self._own_place, str(self.mark))], self._questions.outsider())
            except (ProducerLost, TransactionAborted) as error:
                transaction.discard()
                if self._stop.is_set():
                    raise
                log.warning("%s: no producer yet: %s", self.name, error)
                self._presence.look()
                back_off = BACK_OFF_SECONDS
            else:
                return transaction

    def refuse_successor(self) -> None:
        """Raise Superseded when a later process of this instance has left its mark.

        A node killed with -9 can forget the end of our own transaction; its offsets then stay pending until the sweep
        of the next claim ends it, so the look at the marks has a limit, and ``take`` looks again after the sweep.
        """
        if self.mark is None:
            return
        try:
            marks = self._questions.marks([*self._inputs, self._own_place], limit=PENDING_SECONDS)
        except Unanswered as error:
            log.warning("%s: going on without a look at the marks: %s", self.name, error)
            return
        self.mark.refuse_successor(marks)

    def _sweep(self, transaction: Transaction) -> None:
        places = [(self._connection.topic(topic), partition) for topic, partition in self._outputs]
        transaction.sweep(places, self._at(self._inputs[0]), self._questions.outsider())

    def _at(self, place: Place, metadata: str = "") -> TopicPartition:
        topic, partition = place
        return TopicPartition(self._connection.topic(topic), partition, 0, metadata)
