"""Demand snapshots, free capacity, lost leases and who gets what (protocol 5)."""

from __future__ import annotations

from stage_feed import make_demand

from headrace.pipeline.leases import Leases, Work, Worker
from headrace.pipeline.runtime.store import MemoryStore, StoreView
from headrace.schemas.config import RolloutConfig
from headrace.schemas.records import Prompt, Task


class Desk:
    """Leases with a store, and short names for what tests do."""

    def __init__(self, **config: object) -> None:
        self.memory = MemoryStore()
        self.store = StoreView(self.memory, b"s")
        self.config = RolloutConfig.model_validate(config)
        self.leases = Leases(self.config)

    def reopened(self) -> Leases:
        self.leases.flush(self.store)
        leases = Leases(self.config)
        for work in leases.load(self.store):
            leases.queue(work, (0,))
        return leases

    def demand(self, worker: str = "w0", now: int = 0, **more: object) -> list[Work]:
        return self.leases.demand(make_demand(worker, **more), now, self.store)  # type: ignore[arg-type]

    def queue(self, group: int, replica: int = 0, kind: str = "train", policies: tuple[int, ...] = (0,)) -> Work:
        work = Work(kind=kind, group=group, replica=replica, order=group)
        self.leases.queue(work, policies, self.store)
        return work

    def give(self) -> tuple[Work, Worker] | None:
        found = self.leases.next_waiting([w for w in self.leases.workers.values() if w.free() > 0], lambda _: {0: 0})
        if found is not None:
            self.leases.lease(found[0], found[1], 1000, self.store)
        return found


def held(work: Work) -> Task:
    return Task(
        kind=work.kind, group=work.group, replica=work.replica, attempt=work.attempt, stream="main", worker=work.worker,
        incarnation=work.incarnation, sequence=work.sequence, issued_ms=0, deadline_ms=0,
        prompt=Prompt(prompt_id="", stream="main", dataset="", row=0, epoch=0, position=0),
    )  # fmt: skip


def test_free_is_capacity_less_held_less_written_and_unread() -> None:
    desk = Desk()
    desk.demand(capacity=3)
    for group in range(4):
        desk.queue(group)
    first = desk.give()
    assert first is not None and first[0].sequence == 0
    desk.give()
    worker = desk.leases.workers["w0"]
    assert worker.free() == 1
    desk.demand(capacity=3, read=1, held=[held(first[0])])
    worker = desk.leases.workers["w0"]
    assert worker.free() == 1, "one is held, one is written and not read"
    desk.demand(capacity=1, read=2, held=[held(first[0])])
    assert desk.leases.workers["w0"].free() == 0


def test_a_task_read_and_not_held_has_ended_and_an_unread_one_has_not() -> None:
    desk = Desk()
    desk.demand()
    desk.queue(0)
    desk.queue(1)
    desk.give()
    desk.give()
    desk.demand(read=1)
    assert set(desk.leases.work) == {("train", 1, 0)}


def test_a_new_incarnation_loses_all_leases_and_numbers_from_0_again() -> None:
    desk = Desk()
    desk.demand()
    desk.queue(0)
    found = desk.give()
    assert found is not None
    assert desk.demand(incarnation=2) == [found[0]]
    assert desk.leases.workers["w0"].issued == 0
    assert desk.demand(incarnation=1) == [], "a snapshot of the old one says nothing"
    assert desk.leases.workers["w0"].incarnation == 2


def test_silence_names_a_worker_once_and_time_without_a_broker_does_not_count() -> None:
    desk = Desk(lease_seconds=10)
    desk.demand(now=0)
    assert desk.leases.silent(10_000, 0) == []
    assert desk.leases.silent(10_001, 5_000) == []
    assert [w.name for w in desk.leases.silent(15_001, 5_000)] == ["w0"]
    assert desk.leases.silent(99_000, 5_000) == []
    assert desk.leases.workers["w0"].free() == 0
    desk.demand(now=99_500)
    assert desk.leases.workers["w0"].free() == 4


def test_lost_work_waits_again_as_the_next_attempt_elsewhere_with_its_partial() -> None:
    desk = Desk()
    desk.demand("w0")
    desk.queue(0)
    found = desk.give()
    assert found is not None
    work = found[0]
    desk.demand("w0", read=1, held=[held(work)], partials={(0, 0): 17})
    desk.demand("w1", capacity=1)
    assert desk.leases.retry(work, "lease", (0,), desk.store)
    again = desk.give()
    assert again is not None
    assert (again[1].name, again[0].attempt, again[0].partial, again[0].lost) == ("w1", 1, 17, 1)


def test_attempts_are_used_up_by_failures_and_by_lost_leases_apart() -> None:
    desk = Desk(max_episode_failures=2, max_lost_leases=3)
    desk.demand()
    work = desk.queue(0)
    results = []
    for loss in ("lease", "deadline", "lease", "lease"):
        desk.give()
        results.append(desk.leases.retry(work, loss, (0,), desk.store))  # type: ignore[arg-type]
        desk.demand(read=desk.leases.workers["w0"].issued)
    assert results == [True, True, True, False]
    assert not desk.leases.work
    other = desk.queue(1)
    desk.give()
    assert desk.leases.retry(other, "deadline", (0,), desk.store)
    desk.demand(read=desk.leases.workers["w0"].issued)
    desk.give()
    assert not desk.leases.retry(other, "deadline", (0,), desk.store)


def test_overdue_leases_are_named_once_and_only_the_attempt_that_is_late() -> None:
    desk = Desk()
    desk.demand()
    work = desk.queue(0)
    desk.give()
    assert desk.leases.overdue(1000) == []
    assert desk.leases.overdue(1001) == [work]
    assert desk.leases.overdue(1001) == []


def test_oldest_group_first_and_scores_before_trajectories() -> None:
    desk = Desk()
    desk.queue(2)
    desk.queue(1, replica=1)
    desk.queue(1, replica=0)
    desk.queue(1, kind="score", policies=())
    desk.demand(capacity=9)
    order = [found[0].key for _ in range(4) if (found := desk.give())]
    assert order == [("score", 1, 0), ("train", 1, 0), ("train", 1, 1), ("train", 2, 0)]


def test_workers_by_role_hosted_policies_versions_and_free_capacity() -> None:
    desk = Desk()
    desk.demand("other", versions={1: 0}, capacity=9)
    desk.demand("judge", role="eval", capacity=9)
    desk.queue(0)
    assert desk.give() is None
    desk.demand("small", capacity=2, versions={0: 3})
    desk.demand("large", capacity=3, versions={0: 0})
    free = list(desk.leases.workers.values())
    best = desk.leases.best_worker("train", (0,), free)
    assert best is not None and best.name == "large"
    best = desk.leases.best_worker("train", (0,), free, bounds={0: 2})
    assert best is not None and best.name == "small", "it need not wait for weights"
    best = desk.leases.best_worker("train", (0,), free, avoid="large")
    assert best is not None and best.name == "small"
    best = desk.leases.best_worker("eval", (0,), free)
    assert best is not None and best.name == "judge"


def test_cancel_drops_what_waits_and_names_each_lease_once() -> None:
    desk = Desk()
    desk.demand(capacity=1)
    desk.queue(0, 0)
    desk.queue(0, 1)
    found = desk.give()
    assert found is not None
    assert desk.leases.cancel(0, desk.store) == [found[0]]
    assert desk.leases.cancel(0, desk.store) == []
    assert set(desk.leases.work) == {("train", 0, 0)}
    desk.demand(capacity=1, read=1)
    assert not desk.leases.work and not desk.leases.of_group
    assert desk.give() is None


def test_everything_comes_back_from_the_store() -> None:
    desk = Desk()
    desk.demand("w0")
    desk.demand("w1", capacity=2)
    for group in range(5):
        desk.queue(group)
    desk.give()
    found = desk.give()
    assert found is not None
    desk.leases.retry(found[0], "lease", (0,), desk.store)
    again = desk.reopened()
    assert again.work == desk.leases.work
    assert {k: v for k, v in again.of_worker.items() if v} == {k: v for k, v in desk.leases.of_worker.items() if v}
    assert [w.issued for w in again.workers.values()] == [w.issued for w in desk.leases.workers.values()]
    assert again.overdue(2000) == [w for w in again.work.values() if w.worker]


def test_a_worker_that_says_farewell_loses_its_leases_at_once_and_gets_no_more() -> None:
    desk = Desk()
    desk.demand(capacity=3)
    for group in range(2):
        desk.queue(group)
        assert desk.give() is not None
    lost = desk.demand(incarnation=2, capacity=0)
    assert {work.group for work in lost} == {0, 1}
    desk.queue(5)
    assert desk.give() is None
