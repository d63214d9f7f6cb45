"""Bring tasks to the state of their last commit: changelogs into stores, positions agreed with the group's offsets.

Both were written by one transaction, so they must be equal; missing group offsets (they expire) are taken from the
changelog, different ones are refused after the time in which a transaction's markers may still be on their way
(protocol 2).
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_errors import KafkaFailure
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.transaction import TRANSACTION_TIMEOUT_MS, ProducerLost
from headrace.pipeline.runtime.frontier import Place
from headrace.pipeline.runtime.questions import Questions
from headrace.pipeline.runtime.task import Task, TaskState
from headrace.schemas.errors import ConfigurationError

__all__ = ("Attacher",)

log = logging.getLogger(__name__)

SETTLE_SECONDS = 1.5 * TRANSACTION_TIMEOUT_MS / 1000
"""Time in which a transaction that somebody left open has ended everywhere."""

Attached = list[tuple[Task, dict[Place, int]]]


class Attacher:
    """Restores the tasks of one worker."""

    def __init__(self, connection: Connection, questions: Questions, stop: StopSignal) -> None:
        self._connection = connection
        self._questions = questions
        self._stop = stop

    def suspend(self, tasks: Sequence[Task]) -> list[Task]:
        """Tasks whose partitions were revoked, right after their last commit: note where their changelogs end.

        Those that cannot be asked about within a second are closed instead.
        """
        kept = []
        ends = self._questions.ends([(topic, task.number) for task in tasks for topic in task.changelogs().values()])
        for task in tasks:
            task.move_to(TaskState.CLOSED if ends is None else TaskState.SUSPENDED)
            if ends is not None:
                task.changelog_end = sum(ends[topic, task.number] for topic in task.changelogs().values())
                kept.append(task)
        return kept

    def attach(self, tasks: Sequence[Task], again: Callable[[int, tuple[Place, ...]], Task]) -> Attached:
        """Restore created tasks, keep suspended ones that nobody wrote to since; returns each with its positions.

        ``again`` makes a task anew. Raises ConfigurationError when offsets and changelog do not agree, ProducerLost
        on stop.
        """
        until = time.monotonic() + SETTLE_SECONDS
        while tasks:
            committed = self._questions.committed([place for task in tasks for place in task.places])
            ends = self._settled_ends(tasks, until)
            tasks = [self._usable(task, ends, again) for task in tasks]
            if self._restore([task for task in tasks if task.state is TaskState.RESTORING]):
                offsets = {place: offset for place, (offset, _) in committed.items()}
                attached = [(task, _agreed(task, offsets)) for task in tasks]
                different = [task for task, positions in attached if positions is None]
                if not different:
                    return [(task, positions) for task, positions in attached if positions is not None]
                if time.monotonic() > until:
                    raise ConfigurationError(self._explain(different[0], offsets))
            if self._stop.wait(0.2):
                raise ProducerLost("stopped while attaching tasks")
            tasks = [self._anew(task, again) for task in tasks]
        return []

    def _usable(self, task: Task, ends: dict[Place, int], again: Callable[[int, tuple[Place, ...]], Task]) -> Task:
        if task.state is TaskState.SUSPENDED:
            now = sum(ends[topic, task.number] for topic in task.changelogs().values())
            if now == task.changelog_end:
                return task
            task = self._anew(task, again)
        task.move_to(TaskState.RESTORING)
        return task

    def _anew(self, task: Task, again: Callable[[int, tuple[Place, ...]], Task]) -> Task:
        task.move_to(TaskState.CLOSED)
        return again(task.number, task.places)

    def _settled_ends(self, tasks: Sequence[Task], until: float) -> dict[Place, int]:
        """Last stable ends of the changelogs, once no transaction is open in them or time is up."""
        places = [(topic, task.number) for task in tasks for topic in task.changelogs().values()]
        while True:
            stable = self._ends(places, committed=True)
            if stable == self._ends(places, committed=False) or time.monotonic() > until:
                return stable
            if self._stop.wait(0.05):
                raise ProducerLost("stopped while attaching tasks")

    def _ends(self, places: Sequence[Place], *, committed: bool) -> dict[Place, int]:
        topics = {topic for topic, _ in places}
        found = {
            topic: self._questions.patiently(
                "the end of a changelog", partial(self._connection.end_offsets, topic, committed=committed)
            )
            for topic in topics
        }
        return {(topic, partition): found[topic][partition] for topic, partition in places}

    def _restore(self, tasks: Sequence[Task]) -> bool:
        """Read the changelogs into the tasks' stores; False when the broker went away on the way."""
        by_number = {task.number: task for task in tasks}
        for store, topic in tasks[0].changelogs().items() if tasks else ():
            began, records = time.monotonic(), 0
            try:
                for raw in self._connection.read_topic(topic, dict.fromkeys(by_number, 0)):
                    by_number[raw.partition].restore(store, [(raw.key, raw.value)])
                    records += 1
            except KafkaFailure as error:
                log.warning("restoring from %s: %s; again", topic, error)
                return False
            log.info("restored %s: %d records in %.2f s", topic, records, time.monotonic() - began)
        return True

    def _explain(self, task: Task, committed: dict[Place, int]) -> str:
        saved = task.saved_positions() or {}
        places = [
            f"{self._connection.topic(topic)}[{p}]: group {committed[topic, p]}, changelog {saved.get((topic, p), -1)}"
            for topic, p in task.places
            if committed[topic, p] not in (-1, saved.get((topic, p), -1))
        ]
        return (
            f"the group's offsets and the changelog of task {task.number} do not agree, although one transaction "
            f"writes both: {'; '.join(places)}. Somebody reset offsets or deleted records. Delete the group's offsets "
            "to go on from the changelog, or start a new run"
        )


def _agreed(task: Task, committed: dict[Place, int]) -> dict[Place, int] | None:
    """Where to read on; None when the group's offsets and the changelog differ."""
    saved = task.saved_positions()
    if saved is None:
        started = any(committed[place] >= 0 for place in task.places)
        return None if started else dict.fromkeys(task.places, 0)
    if any(committed[place] not in (-1, saved.get(place)) for place in task.places):
        return None
    return {place: saved.get(place, 0) for place in task.places}
