"""A worker's membership in its consumer group: what was given, kept with the metadata that proves it.

Callbacks of the client only note what happened and take the group's metadata; the worker attaches tasks afterwards, in
its own loop. Metadata is never asked for at another moment, because a broker checks membership and not ownership: fresh
metadata would let a loser commit for a task that it no longer has (protocol 7).
"""

import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import TopicPartition

from headrace.connectors.kafka import Connection, Consumer
from headrace.pipeline.runtime.frontier import Place
from headrace.schemas.ids import unprefixed

__all__ = ("Membership",)

LEAVE_SECONDS = 0.5
"""Time in which the group hears that a member goes."""


class Membership:
    """The group's last word to one consumer."""

    def __init__(
        self, connection: Connection, consumer: Consumer, on_revoke: Callable[[], None], on_lost: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._consumer = consumer
        self._revoked = on_revoke
        self._lost = on_lost
        self.given: list[Place] | None = None
        """Partitions that were given and are not attached yet; None when there is nothing new."""
        self.metadata: Any = consumer.consumer_group_metadata()
        """Of the assignment in force; before the first one, that of an outsider."""

    def join(self, topics: tuple[str, ...]) -> None:
        """Subscribe to topics of the run."""
        self._consumer.subscribe(
            [self._connection.topic(topic) for topic in topics],
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )

    def leave(self) -> None:
        """Tell the group that this member goes: others take its tasks at once and not after its session.

        A static member that merely closes is waited for, which is right after a crash and wrong when it is to go.
        """
        self._consumer.unsubscribe()
        until = time.monotonic() + LEAVE_SECONDS
        while self._consumer.memberid() and time.monotonic() < until:
            self._consumer.poll(0.02)

    def _on_assign(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        run = self._connection.run
        self.metadata = consumer.consumer_group_metadata()
        self.given = [(unprefixed(run, p.topic), p.partition) for p in partitions]
        consumer.assign([])

    def _on_revoke(self, _consumer: Any, _partitions: list[TopicPartition]) -> None:
        self.given = None
        self._revoked()

    def _on_lost(self, _consumer: Any, _partitions: list[TopicPartition]) -> None:
        self.given = None
        self._lost()
