"""Whether the run's topics are still there, looked at when transactions fail: with one that is gone they never succeed.

A cluster that starts may not know its topics yet, so one that is missing counts as deleted only after a while.
"""

import time
from collections.abc import Collection

from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_errors import KafkaFailure, MissingTopic

__all__ = ("Presence",)

GONE_SECONDS = 20.0
"""A topic that the cluster has not known for so long has been deleted."""


class Presence:
    """The topics that a worker found when it started, without the run's prefix."""

    def __init__(self, connection: Connection, topics: Collection[str]) -> None:
        self._connection = connection
        self._topics = topics
        self._missed: float | None = None
        """Since when some are missing (monotonic)."""

    def refuse(self, topics: Collection[str], advice: str) -> None:
        """Raise MissingTopic when there are any that do not exist."""
        if topics:
            names = ", ".join(map(self._connection.topic, topics))
            where = self._connection.bootstrap
            raise MissingTopic(f"topics {names} do not exist on the cluster at {where}; {advice}")

    def look(self) -> None:
        """Ask which there are, if anybody answers. Raises MissingTopic when some have been gone for long."""
        try:
            have = self._connection.list_run_topics()
        except KafkaFailure:
            return
        gone = [topic for topic in self._topics if topic not in have]
        self._missed = (self._missed or time.monotonic()) if gone else None
        if self._missed is not None and time.monotonic() - self._missed > GONE_SECONDS:
            self.refuse(gone, "somebody has deleted them with what they held: start a new run")
