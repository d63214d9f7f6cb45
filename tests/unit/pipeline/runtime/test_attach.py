"""Tasks on their way: what is asked in which order, who waits for whom, and what is refused; answers are scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from toy_worker import Chain, toy_config

from headrace.connectors.marks import Mark
from headrace.pipeline.runtime import attach as module
from headrace.pipeline.runtime.attach import Attacher
from headrace.pipeline.runtime.frontier import Frontier, Place
from headrace.pipeline.runtime.metrics import Registry, StageMetrics
from headrace.pipeline.runtime.questions import Committed
from headrace.pipeline.runtime.store import MemoryStore, OverlayStore
from headrace.pipeline.runtime.task import POSITIONS_KEY, Task, TaskState
from headrace.schemas.errors import ConfigurationError

TOPIC = "assemble-state-changelog"


class Cluster:
    """Questions and copies at once: ends of changelogs, the group's offsets, and what a restoration finds."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.stable: dict[int, int] = {}
        self.open: dict[int, int] = {}
        """Offsets that lie behind the last stable one."""
        self.offsets: dict[int, int] = {}
        """The group's offset of every input of a task."""
        self.marks: dict[int, Mark] = {}
        """Who of ours committed it."""
        self.pending: set[int] = set()
        """Tasks whose offsets are kept back by an open transaction."""
        self.away = False
        self.found: dict[int, int] = {}
        """Positions in the changelog of a task."""
        self.unread: set[int] = set()
        self.asked: list[tuple[tuple[int, ...], float]] = []
        self.held: dict[int, Mapping[str, OverlayStore]] = {}
        self.whole: dict[int, float] = {}
        """Since when a kept store may have missed something."""
        self.released: list[int] = []
        self.slices: list[float] = []

    # questions

    def ends(self, places: Sequence[Place]) -> dict[Place, int] | None:
        return None if self.away else {place: self.stable.get(place[1], 0) for place in places}

    def all_ends(self, _topic: str) -> dict[int, int]:
        return {n: self.stable.get(n, 0) + self.open.get(n, 0) for n in range(4)}

    def committed_within(self, places: Sequence[Place], seconds: float) -> dict[Place, Committed] | None:
        numbers = tuple(sorted({p for _, p in places}))
        self.asked.append((numbers, seconds))
        self.seconds += seconds if self.pending & set(numbers) else 0.0
        if self.pending & set(numbers):
            return None
        return {place: (self.offsets.get(place[1], -1), self.marks.get(place[1])) for place in places}

    # copies

    def restore(self, number: int, stores: Mapping[str, OverlayStore], _ends: Mapping[str, int]) -> None:
        self.held[number] = stores
        if number in self.found:
            at = [["trajectories", number, self.found[number]], ["admissions", number, self.found[number]]]
            stores[TOPIC].restore([(POSITIONS_KEY, json.dumps({"saved_ms": 1, "at": at}).encode())])

    def restored(self, number: int) -> bool:
        return number not in self.unread

    def read(self, seconds: float, *, wait: bool) -> None:
        self.slices.append(seconds)

    def take(self, number: int) -> None:
        del self.held[number]

    def keep(self, number: int, stores: Mapping[str, OverlayStore], _at: Mapping[str, int], whole: float) -> None:
        self.held[number] = stores
        self.whole[number] = whole

    def stores_of(self, number: int) -> Mapping[str, OverlayStore] | None:
        return self.held.get(number)

    def release(self, number: int) -> None:
        self.released.append(number)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster()
    monkeypatch.setattr(module.time, "monotonic", lambda: cluster.seconds)
    yield cluster


class Rig:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.registry = cluster, Registry()
        connection: Any = SimpleNamespace(topic=lambda name: f"run.{name}")
        parts: Any = cluster
        self.attacher = Attacher(connection, parts, parts, StageMetrics(self.registry, "assemble"), self.make)

    def make(self, number: int, places: tuple[Place, ...], stores: Mapping[str, OverlayStore] | None = None) -> Task:
        return Task(
            config=toy_config("toy"), sub_topology="assemble", number=number, places=places, factory=Chain,
            sink=lambda *_: None, frontier=Frontier(lambda _p: {}, lambda _p: 0, lambda _s, _e: None, lambda: 0),
            metrics=self.registry, clock=lambda: 0, pause=lambda _p, _w: None, stores=stores,
        )  # fmt: skip

    def begin(self, *numbers: int) -> list[Task]:
        tasks = [self.make(n, (("trajectories", n), ("admissions", n))) for n in numbers]
        self.attacher.begin(tasks)
        return tasks

    def suspended(self, number: int, end: int) -> Task:
        """A task that ran and was suspended when its changelog had this end."""
        task = self.make(number, (("trajectories", number), ("admissions", number)))
        for state in (TaskState.RESTORING, TaskState.RUNNING):
            task.move_to(state)
        self.cluster.stable[number] = end
        assert self.attacher.suspend([task]) == [task]
        return task

    def steps(self, seconds: float = 0.05, count: int = 1, *, others: bool = False) -> dict[int, dict[Place, int]]:
        out: dict[int, dict[Place, int]] = {}
        for _ in range(count):
            out |= {task.number: at for task, at in self.attacher.step(others=others)}
            self.cluster.seconds += seconds
        return out


def test_a_new_task_starts_at_the_beginning_and_a_restored_one_where_it_was(cluster: Cluster) -> None:
    rig = Rig(cluster)
    rig.begin(0, 1)
    cluster.stable[1] = cluster.found[1] = cluster.offsets[1] = 7
    ready = rig.steps(count=2)
    assert {n: set(at.values()) for n, at in ready.items()} == {0: {0}, 1: {7}}
    assert not rig.attacher.busy
    assert cluster.held == {}


def test_missing_offsets_are_taken_from_the_changelog_and_others_are_refused_in_the_end(cluster: Cluster) -> None:
    rig = Rig(cluster)
    rig.begin(0, 1)
    cluster.stable = {0: 9, 1: 9}
    cluster.found = {0: 5, 1: 5}
    cluster.offsets = {1: 6}
    ready = rig.steps(count=4)
    assert {n: set(at.values()) for n, at in ready.items()} == {0: {5}}
    with pytest.raises(ConfigurationError, match=r"run\.trajectories\[1\]: group 6, changelog 5") as caught:
        rig.steps(1.0, 30)
    assert "Delete the group's offsets" in str(caught.value)


def test_old_offsets_of_our_own_give_way_to_the_changelog_and_newer_ones_never(cluster: Cluster) -> None:
    rig = Rig(cluster)
    rig.begin(0)
    cluster.stable, cluster.found, cluster.offsets = {0: 9, 1: 9}, {0: 5, 1: 5}, {0: 4, 1: 6}
    cluster.marks = {0: Mark("operators-0", 1), 1: Mark("operators-0", 1)}
    assert rig.steps(1.0, 10) == {}, "a marker may still be on its way"
    assert set(rig.steps(1.0, 10)[0].values()) == {5}
    assert rig.registry.value("outdated_offsets_total", stage="assemble") == 1
    rig.begin(1)
    with pytest.raises(ConfigurationError, match=r"run\.trajectories\[1\]: group 6, changelog 5"):
        rig.steps(1.0, 30)


def test_offsets_that_were_late_agree_when_they_are_asked_for_again(cluster: Cluster) -> None:
    rig = Rig(cluster)
    rig.begin(0)
    cluster.stable, cluster.found, cluster.offsets = {0: 9}, {0: 5}, {0: 4}
    assert rig.steps(count=3) == {}
    cluster.offsets = {0: 5}
    assert set(rig.steps(0.1, 3)[0].values()) == {5}


def test_a_neighbours_open_transaction_keeps_one_task_back_and_costs_the_others_little(cluster: Cluster) -> None:
    rig = Rig(cluster)
    rig.begin(0, 1)
    cluster.pending = {1}
    began = cluster.seconds
    ready = rig.steps(0.05, 40, others=True)
    assert set(ready) == {0}
    waited = sum(seconds for numbers, seconds in cluster.asked if 1 in numbers)
    assert waited < (cluster.seconds - began) / 3, "questions in vain rest in between"
    assert max(seconds for _, seconds in cluster.asked) <= module.LONGEST_ASK_SECONDS
    cluster.pending = set()
    assert set(rig.steps(0.5, 8)) == {1}


def test_offsets_that_stay_pending_give_way_to_the_changelog_only_while_the_broker_answers(cluster: Cluster) -> None:
    rig = Rig(cluster)
    rig.begin(0)
    cluster.pending, cluster.stable, cluster.found, cluster.away = {0}, {0: 9}, {0: 5}, True
    assert rig.steps(1.0, 40) == {}
    cluster.away = False
    assert rig.steps(1.0, 10) == {}, "without a broker no transaction ends, so that time does not count"
    assert set(rig.steps(1.0, 10)[0].values()) == {5}


def test_after_an_outage_a_transaction_gets_its_time_before_offsets_are_refused(cluster: Cluster) -> None:
    rig = Rig(cluster)
    rig.begin(0)
    cluster.away = True
    assert rig.steps(1.0, 40) == {}
    cluster.away = False
    cluster.stable, cluster.open, cluster.found, cluster.offsets = {0: 9}, {0: 3}, {0: 5}, {0: 7}
    assert rig.steps(1.0, 5) == {}, "the changelog's marker is still on its way"
    cluster.open, cluster.found = {}, {0: 7}
    assert set(rig.steps(1.0, 3)[0].values()) == {7}


def test_a_changelog_with_an_open_transaction_is_waited_for_up_to_a_limit(cluster: Cluster) -> None:
    rig = Rig(cluster)
    rig.begin(0)
    cluster.open = {0: 3}
    assert rig.steps(1.0, 10) == {}
    assert set(rig.steps(1.0, 8)) == {0}, "by then, whoever left it open was fenced"


def test_a_suspended_task_goes_on_when_nobody_wrote_and_is_restored_otherwise(cluster: Cluster) -> None:
    rig = Rig(cluster)
    same, other = rig.suspended(0, 8), rig.suspended(1, 8)
    cluster.stable[1] = 12
    suspended, cluster.seconds = cluster.seconds, cluster.seconds + 100
    rig.attacher.begin([same, other])
    ready = rig.steps(count=4)
    assert cluster.whole == {1: suspended}, "deletions since then may be forgotten already"
    assert set(ready) == {0, 1}
    assert (same.state, other.state) == (TaskState.SUSPENDED, TaskState.CLOSED)
    values = {n: rig.registry.value(f"tasks_{n}_total", stage="assemble") for n in ("resumed", "restored")}
    assert values == {"resumed": 1, "restored": 1}


def test_ready_tasks_gather_while_others_run_and_go_at_once_when_none_does(cluster: Cluster) -> None:
    rig = Rig(cluster)
    rig.begin(0, 1)
    cluster.unread = {1}
    assert rig.steps(0.1, 3, others=True) == {}
    assert set(rig.steps(0.1, 5, others=True)) == {0}
    rig.begin(2)
    assert set(rig.steps(0.1, 2)) == {2}
    assert max(cluster.slices[:8]) == module.SLICE_SECONDS
    assert cluster.slices[-1] == module.IDLE_SLICE_SECONDS


def test_calling_off_closes_what_restores_keeps_what_was_read_and_gives_back_the_suspended(cluster: Cluster) -> None:
    rig = Rig(cluster)
    (restoring,) = rig.begin(0)
    cluster.unread = {0}
    rig.steps(count=2)
    restoring.stores["state"].restore([(b"k", b"v")])
    asleep = rig.suspended(1, 8)
    rig.attacher.begin([asleep])
    (created,) = rig.begin(2)
    assert rig.attacher.call_off() == [asleep]
    assert (restoring.state, asleep.state, created.state) == (TaskState.CLOSED, TaskState.SUSPENDED, TaskState.CLOSED)
    assert 0 in cluster.released
    assert cluster.held[0][TOPIC].get(b"k") == b"v"
    assert not rig.attacher.busy


def test_tasks_that_cannot_be_asked_about_are_closed_instead_of_suspended(cluster: Cluster) -> None:
    rig = Rig(cluster)
    task = rig.make(0, (("trajectories", 0), ("admissions", 0)))
    for state in (TaskState.RESTORING, TaskState.RUNNING):
        task.move_to(state)
    cluster.away = True
    assert rig.attacher.suspend([task]) == []
    assert task.state is TaskState.CLOSED
    assert isinstance(task.stores["state"], MemoryStore)
    assert rig.attacher.suspend([]) == []
