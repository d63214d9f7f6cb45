"""Where a worker keeps the state of tasks that it does not run: copies that it follows, and files for large stores.

Goes in: which tasks the group gave to this worker; comes out: stores for a new task, empty or already filled by
following its changelog. What is followed is bounded (``runtime.standby_bytes``); files belong to one instance only.
"""

import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from headrace.connectors.kafka import Connection
from headrace.pipeline.runtime.copies import Copies
from headrace.pipeline.runtime.metrics import StageMetrics
from headrace.pipeline.runtime.questions import Questions
from headrace.pipeline.runtime.sqlite_store import SqliteStore
from headrace.pipeline.runtime.stage import Metrics
from headrace.pipeline.runtime.store import MemoryStore, OverlayStore
from headrace.pipeline.runtime.task import Task
from headrace.schemas.config import RunConfig
from headrace.schemas.ids import changelog_topic
from headrace.schemas.topics import STORES

__all__ = ("Shelf",)


class Shelf:
    """Copies and store files of one worker."""

    def __init__(
        self,
        connection: Connection,
        config: RunConfig,
        sub_topology: str,
        instance: str,
        counts: Mapping[str, int],
        questions: Questions,
        metrics: Metrics,
    ) -> None:
        name = f"{sub_topology}.{instance}"
        self._topics = {store: changelog_topic(sub_topology, store) for store in STORES[sub_topology]}
        self._questions = questions
        self._folder: Path | None = None
        if sub_topology in config.runtime.on_disk:
            self._folder = Path(config.runtime.folder or config.run_folder() / "state") / name
            # What a killed process of this instance left is of no use to anybody.
            shutil.rmtree(self._folder, ignore_errors=True)
        self._follows = sub_topology in config.runtime.standby and config.runtime.standby_bytes > 0
        self._tasks = counts[self._topics[STORES[sub_topology][0]]]
        stage_metrics = StageMetrics(metrics, sub_topology)
        self.copies = Copies(connection, name, questions.first, stage_metrics, config.runtime.standby_bytes)

    @property
    def held(self) -> bool:
        """Whether there are copies to read for."""
        return len(self.copies) > 0

    def stores_for(self, number: int) -> dict[str, OverlayStore]:
        """Stores by name for a new task: those that are held of it, else empty ones. Raises StoreFile."""
        held = self.copies.stores_of(number)
        if held is not None:
            return {name: held[topic] for name, topic in self._topics.items()}
        if self._folder is not None:
            return {name: SqliteStore(self._folder, f"{name}-{number}") for name in self._topics}
        return {name: MemoryStore() for name in self._topics}

    def arrange(self, elsewhere: Iterable[Task], own: Collection[int]) -> None:
        """After an assignment: tasks that went ``elsewhere`` are closed, their state is followed if it is to be."""
        for task in elsewhere:
            if self._follows and not self.copies.full:
                self.copies.keep(task.number, task.stores_by_topic(), task.changelog_ends, task.suspended)
                task.close(keep_stores=True)
            else:
                task.close()
        others = [number for number in range(self._tasks) if number not in own] if self._follows else []
        self.copies.follow(others, own, self._empty)

    def look(self) -> None:
        """From time to time, see that the copies keep up."""
        self.copies.compare(self._questions.ends)

    def close(self) -> None:
        """Forget everything and remove the files."""
        self.copies.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _empty(self, number: int) -> Mapping[str, OverlayStore]:
        stores = self.stores_for(number)
        return {topic: stores[name] for name, topic in self._topics.items()}
