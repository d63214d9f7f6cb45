"""Bring tasks to the state of their last commit: changelogs into stores, positions agreed with the group's offsets.

In slices: ``begin`` takes tasks that were created or suspended, every ``step`` does a little and gives those that are
ready. Group offsets and changelog were written by one transaction, so they must be equal; missing offsets (they expire)
are taken from the changelog, different ones are refused after the time in which a transaction's markers may still be on
their way (protocol 2). Only what we committed ourselves and lies below the changelog is passed over then: a Kafka node
that was killed can come back with an old state of a group.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.connectors.kafka import Connection
from headrace.connectors.transaction import TRANSACTION_TIMEOUT_MS
from headrace.pipeline.runtime.copies import Copies
from headrace.pipeline.runtime.frontier import Place
from headrace.pipeline.runtime.metrics import StageMetrics
from headrace.pipeline.runtime.questions import Committed, Questions
from headrace.pipeline.runtime.store import OverlayStore
from headrace.pipeline.runtime.task import Task, TaskState
from headrace.schemas.errors import ConfigurationError

__all__ = ("Attached", "Attacher")

log = logging.getLogger(__name__)

SETTLE_SECONDS = 1.5 * TRANSACTION_TIMEOUT_MS / 1000
"""Time in which a transaction that somebody left open has ended everywhere."""
ASK_SECONDS = 0.05
"""First patience with one question, while other tasks wait for the answer; it doubles with every question in vain."""
LONGEST_ASK_SECONDS = 0.5
REST = 4
"""... and for so many times as long nothing is asked afterwards."""
AGAIN_SECONDS = 0.05
SLICE_SECONDS = 0.01
"""Time that ready tasks give to restoring ones in a turn."""
IDLE_SLICE_SECONDS = 0.1
"""... and when there is no ready task."""
GATHER_SECONDS = 0.5
"""Ready tasks wait so long for others, because each start makes the consumer fetch anew for all that run."""
SUSPEND_SECONDS = 0.3
"""Time in which the markers of a task's own last commit are waited for."""

Attached = list[tuple[Task, dict[Place, int]]]


@dataclass(slots=True)
class _Coming:
    """A task on its way: the group's offsets once they are known, and when to ask (again)."""

    task: Task
    until: float
    """When a transaction that was left open has ended, if the broker answers until then."""
    began: float
    offsets: Mapping[Place, Committed] = field(default_factory=dict)
    ask_at: float = 0.0
    patience: float = ASK_SECONDS
    asked: bool = False
    positions: dict[Place, int] | None = None
    """Where to read on: the task is ready."""
    ready_at: float = 0.0

    def ready(self, positions: dict[Place, int]) -> None:
        self.positions, self.ready_at = positions, time.monotonic()


class Attacher:
    """Attaches the tasks of one worker; ``make`` gives a new task over stores."""

    def __init__(
        self,
        connection: Connection,
        questions: Questions,
        copies: Copies,
        metrics: StageMetrics,
        make: Callable[[int, tuple[Place, ...], Mapping[str, OverlayStore]], Task],
    ) -> None:
        self._connection = connection
        self._make = make
        self._questions = questions
        self._copies = copies
        self._metrics = metrics
        self._coming: dict[int, _Coming] = {}

    # suspended tasks

    def suspend(self, tasks: Sequence[Task]) -> list[Task]:
        """Tasks whose partitions were revoked, right after their last commit: note where their changelogs end.

        Those that cannot be asked about are closed instead.
        """
        if not tasks:
            return []
        places = [(topic, task.number) for task in tasks for topic in task.changelogs().values()]
        asked = time.monotonic()
        until = asked + SUSPEND_SECONDS
        while (ends := self._questions.ends(places)) is not None and time.monotonic() < until:
            newest = {topic: self._questions.all_ends(topic) for topic in {topic for topic, _ in places}}
            if all(newest[topic][number] == end for (topic, number), end in ends.items()):
                break
        for task in tasks:
            if ends is None:
                task.close()
            else:
                task.move_to(TaskState.SUSPENDED)
                task.changelog_ends = {topic: ends[topic, task.number] for topic in task.changelogs().values()}
                task.suspended = asked
        return [task for task in tasks if task.state is TaskState.SUSPENDED]

    # the way

    def begin(self, tasks: Iterable[Task]) -> None:
        """Start with tasks that are created or suspended."""
        now = time.monotonic()
        for task in tasks:
            self._coming[task.number] = _Coming(task, now + SETTLE_SECONDS, now)

    @property
    def busy(self) -> bool:
        """True while tasks are on their way."""
        return bool(self._coming)

    def places(self) -> list[Place]:
        """Input partitions of the tasks on their way."""
        return [place for coming in self._coming.values() for place in coming.task.places]

    def call_off(self) -> list[Task]:
        """The partitions were revoked: close the tasks on their way, but give back those that are still suspended.

        What was read of changelogs is kept for the next time.
        """
        suspended = []
        for number, coming in self._coming.items():
            if coming.task.state is TaskState.SUSPENDED:
                suspended.append(coming.task)
                continue
            coming.task.close(keep_stores=self._copies.stores_of(number) is not None)
            self._copies.release(number)
        self._coming = {}
        return suspended

    def step(self, *, others: bool) -> Attached:
        """Do a slice of the work, a short one when there are ``others`` that could run; returns what is ready.

        Raises ConfigurationError when offsets and changelog do not agree, ProducerLost on stop.
        """
        self._ask()
        self._copies.read(SLICE_SECONDS if others else IDLE_SLICE_SECONDS, wait=not others and self.busy)
        for coming in self._coming.values():
            if coming.task.state is TaskState.RESTORING and coming.asked and coming.positions is None:
                self._check(coming)
        ready = [c for c in self._coming.values() if c.positions is not None]
        waits = others and len(ready) < len(self._coming)
        if not ready or (waits and time.monotonic() - min(c.ready_at for c in ready) < GATHER_SECONDS):
            return []
        return [(coming.task, self._out(coming)) for coming in ready]

    def _out(self, coming: _Coming) -> dict[Place, int]:
        """Let a ready task go; returns its positions."""
        number = coming.task.number
        del self._coming[number]
        restored = coming.task.state is TaskState.RESTORING
        if restored:
            self._copies.take(number)
        self._metrics.count("tasks_restored_total" if restored else "tasks_resumed_total")
        log.info("task %d is ready after %.2f s", number, time.monotonic() - coming.began)
        return coming.positions or {}

    def _check(self, coming: _Coming) -> None:
        """See whether a restoration is complete and agrees with the group's offsets."""
        if not self._copies.restored(coming.task.number):
            return
        positions = _agreed(coming.task, coming.offsets)
        if positions is not None:
            coming.ready(positions)
        elif time.monotonic() > coming.until:
            words = self._differing(coming.task, coming.offsets)
            if not _outdated(coming.task, coming.offsets):
                raise ConfigurationError(
                    f"the group's offsets and the changelog of task {coming.task.number} do not agree, although one "
                    f"transaction writes both: {words}. Somebody reset offsets or deleted records. Delete the group's "
                    "offsets to go on from the changelog, or start a new run"
                )
            log.warning("the cluster gave old offsets of this group, the changelog is taken: %s", words)
            self._metrics.count("outdated_offsets_total")
            coming.ready(coming.task.saved_positions() or {})
        else:
            coming.asked, coming.ask_at = False, time.monotonic() + AGAIN_SECONDS

    def _ask(self) -> None:
        """Ask what is to be known of tasks; those that were suspended and that nobody wrote to since are ready."""
        now = time.monotonic()
        asking = [c for c in self._coming.values() if not c.asked and c.ask_at <= now and c.positions is None]
        suspended = [c for c in asking if c.task.state is TaskState.SUSPENDED]
        for coming, ends in self._settled(suspended):
            self._resume(coming, ends)
        created = [c for c in asking if c.task.state is not TaskState.SUSPENDED]
        if created and not suspended:
            self._look_up(created)

    def _resume(self, coming: _Coming, ends: dict[str, int]) -> None:
        """Go on with a suspended task, or restore what others wrote since."""
        task = coming.task
        if ends == task.changelog_ends:
            coming.ready(task.saved_positions() or dict.fromkeys(task.places, 0))
            return
        self._copies.keep(task.number, task.stores_by_topic(), task.changelog_ends, task.suspended)
        coming.task = self._make(task.number, task.places, task.stores)
        task.close(keep_stores=True)

    def _look_up(self, created: list[_Coming]) -> None:
        """Offsets first, then the ends of the changelogs; one task alone once all together got no answer."""
        created = created if all(c.patience == ASK_SECONDS for c in created) else created[:1]
        places = [place for coming in created for place in coming.task.places]
        offsets = self._questions.committed_within(places, max(c.patience for c in created))
        now = time.monotonic()
        if offsets is None:
            for coming in created:
                coming.ask_at = now + REST * coming.patience
                coming.patience = min(LONGEST_ASK_SECONDS, 2 * coming.patience)
            if self._questions.ends(places) is None:
                self._unanswered()
            if now <= created[0].until:
                return
            # The broker answers, and whoever left these offsets pending was fenced by now: the changelog stands.
            offsets = dict.fromkeys(places, (-1, None))
        for coming, ends in self._settled(created):
            task = coming.task
            coming.asked, coming.offsets = True, {place: offsets[place] for place in task.places}
            if task.state is TaskState.CREATED:
                task.move_to(TaskState.RESTORING)
            self._copies.restore(task.number, task.stores_by_topic(), ends)

    def _settled(self, coming: list[_Coming]) -> list[tuple[_Coming, dict[str, int]]]:
        """Last stable ends of the changelogs of those tasks in which no transaction is open, or whose time is up."""
        places = [(topic, c.task.number) for c in coming for topic in c.task.changelogs().values()]
        stable = self._questions.ends(places) if places else {}
        now = time.monotonic()
        if stable is None:
            self._unanswered()
            for one in coming:
                one.ask_at = now + AGAIN_SECONDS
            return []
        newest = {t: self._questions.all_ends(t) for t in {topic for topic, _ in places}}
        out = []
        for one in coming:
            number, own = one.task.number, one.task.changelogs().values()
            if now > one.until or all(stable[t, number] == newest[t][number] for t in own):
                out.append((one, {t: stable[t, number] for t in own}))
            else:
                one.ask_at = now + AGAIN_SECONDS
        return out

    def _unanswered(self) -> None:
        """Without a broker no transaction ends: the time in which they must have ended starts anew, for all tasks."""
        for one in self._coming.values():
            one.until = time.monotonic() + SETTLE_SECONDS

    def _differing(self, task: Task, committed: Mapping[Place, Committed]) -> str:
        saved = task.saved_positions() or {}
        both = [(place, committed[place][0], saved.get(place, -1)) for place in task.places]
        return "; ".join(
            f"{self._connection.topic(topic)}[{partition}]: group {offset}, changelog {position}"
            for (topic, partition), offset, position in both
            if offset not in (-1, position)
        )


def _agreed(task: Task, committed: Mapping[Place, Committed]) -> dict[Place, int] | None:
    """Where to read on; None when the group's offsets and the changelog differ."""
    saved = task.saved_positions()
    if saved is None:
        started = any(committed[place][0] >= 0 for place in task.places)
        return None if started else dict.fromkeys(task.places, 0)
    if any(committed[place][0] not in (-1, saved.get(place)) for place in task.places):
        return None
    return {place: saved.get(place, 0) for place in task.places}


def _outdated(task: Task, committed: Mapping[Place, Committed]) -> bool:
    """Whether all that differs is older than the changelog, and of ours: who resets offsets leaves no mark."""
    saved = task.saved_positions() or {}
    differing = [place for place in task.places if committed[place][0] not in (-1, saved.get(place))]
    return all(committed[p][1] is not None and committed[p][0] < saved.get(p, -1) for p in differing)
