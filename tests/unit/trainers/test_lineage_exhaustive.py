"""Trainers that die at every point of every short history: what they publish and train keeps the rules of protocol 8.

A small world, the store's head, the ``steps`` topic and the checkpoints, is driven by ``decide`` alone. Every sequence
of lives is tried in which each life ends after any number of durable actions, with and without a rollback between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import pytest

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Record, Resumed, Rollback, Step, Stop
from headrace.trainers.lineage import Plan, Point, StepsSeen, decide, rollback_base, seen_in

LAST, EVERY, KEEP = 4, 2, 2
"""Batches of the run, checkpoint interval, checkpoints kept beside the base."""


class Died(Exception):
    """The trainer was killed before its next durable action."""


@dataclass
class World:
    """What survives a trainer. ``weights`` of a version are the batches in it, by lineage history."""

    steps: list[Record] = field(default_factory=list)
    store: dict[int, tuple[Point, tuple[int, ...]]] = field(default_factory=dict)
    checkpoints: dict[Point, tuple[int, ...]] = field(default_factory=dict)
    budget: int = 0
    beside: bool = False
    """Checkpoints are written beside the next batch: durable after the Step of their own, not before."""

    def spend(self) -> None:
        if self.budget == 0:
            raise Died
        self.budget -= 1

    @property
    def head(self) -> Point | None:
        return self.store[max(self.store)][0] if self.store else None

    def publish(self, point: Point, trained: tuple[int, ...]) -> None:
        self.spend()
        assert point.version not in self.store, "a version is published once"
        head = self.head
        assert point.version == (head.version + 1 if head else 0), "versions follow each other"
        self.store[point.version] = (point, trained)

    def write(self, record: Record) -> None:
        self.spend()
        self.steps.append(record)

    def save(self, point: Point, trained: tuple[int, ...]) -> None:
        self.spend()
        self.checkpoints.pop(point, None)
        self.checkpoints[point] = trained
        base = seen_in(self.steps).base
        for old in sorted(self.checkpoints)[:-KEEP]:
            if old != base:
                del self.checkpoints[old]


def step(point: Point) -> Step:
    return Step(
        policy=0, batch=point.batch, version=point.version, lineage=point.lineage, updates=1, loss=0.0, tokens=1,
        sequences=1, wait_seconds=0.0, step_seconds=0.0, publish_seconds=0.0, delta_bytes=1, changed_share=1.0,
        finished_ms=1,
    )  # fmt: skip


def announcement(kind: str, point: Point) -> Record:
    if kind == "Step":
        return step(point)
    return Resumed(policy=0, lineage=point.lineage, batch=point.batch, version=point.version)


def roll_back(world: World, version: int) -> None:
    """What ``--resume-from`` does before the plan is made."""
    seen = seen_in(world.steps)
    if seen.stopped or world.head is None:
        return
    base = rollback_base(seen, list(world.checkpoints), version)
    world.write(
        Rollback(
            policy=0, lineage=seen.lineage + 1, base_lineage=base.lineage, base_batch=base.batch,
            base_version=base.version,
        )
    )  # fmt: skip


def live(world: World) -> None:
    """One life of a trainer from its start; raises Died when its budget of durable actions is spent."""
    plan = decide(seen_in(world.steps), world.head, list(world.checkpoints))
    if plan.stopped:
        return
    trained: tuple[int, ...] = ()
    if plan.start is not None:
        trained = world.checkpoints[plan.start]
    if plan.first:
        world.publish(Point(lineage=0, batch=0, version=0), ())
    head = world.head
    assert head is not None
    if plan.announce is not None:
        world.write(announcement(plan.announce, head))
    batch = plan.start_batch
    assert trained == tuple(range(1, batch + 1)), "a checkpoint holds the batches that it stands for"
    while batch < plan.retrain_to:
        batch += 1
        trained = (*trained, batch)
    if plan.publish is not None:
        point = Point(lineage=plan.lineage, batch=batch, version=head.version + 1)
        world.publish(point, trained)
        world.write(announcement(plan.publish, point))
    while batch < LAST:
        batch += 1
        trained = (*trained, batch)
        head = world.head
        assert head is not None
        point = Point(lineage=plan.lineage, batch=batch, version=head.version + 1)
        due = batch % EVERY == 0 or batch == LAST
        if due and not world.beside:
            world.save(point, trained)
        world.publish(point, trained)
        world.write(step(point))
        if due and world.beside:
            world.save(point, trained)
    head = world.head
    assert head is not None
    if Point(lineage=plan.lineage, batch=batch, version=0) not in world.checkpoints:
        world.save(head, trained)  # the last one is waited for before the Stop
    world.write(Stop(reason="steps", policy=0))


def final_steps(records: list[Record]) -> dict[int, Step | Resumed]:
    """What says that a batch of the lineage in force was trained: its Step, or the Resumed of a base without one."""
    line: dict[int, Step | Resumed] = {}
    for record in records:
        if isinstance(record, Rollback):
            line = {batch: s for batch, s in line.items() if batch <= record.base_batch}
        elif isinstance(record, Step):
            assert record.batch not in line, "a batch has one Step in a lineage"
            line[record.batch] = record
        elif isinstance(record, Resumed) and record.batch:
            line.setdefault(record.batch, record)
    return line


def check(world: World) -> None:
    """What must hold after every life."""
    versions = [r.version for r in world.steps if isinstance(r, Step | Resumed)]
    assert versions == sorted(set(versions)), "versions grow and none is announced twice"
    assert set(versions) <= set(world.store), "nothing is announced before it is in the store"
    line = final_steps(world.steps)
    assert list(line) == list(range(1, len(line) + 1)), "no batch is left out"
    for record in world.steps:
        if isinstance(record, Step | Resumed):
            point, trained = world.store[record.version]
            assert (point.lineage, point.batch) == (record.lineage, record.batch)
            assert trained == tuple(range(1, record.batch + 1)), "a version holds exactly the batches it stands for"


def finish(world: World) -> None:
    """The last life dies of nothing; the run must come to its end."""
    world.budget = 1000
    live(world)
    check(world)
    line = final_steps(world.steps)
    assert list(line) == list(range(1, LAST + 1))
    assert isinstance(world.steps[-1], Stop)
    assert decide(seen_in(world.steps), world.head, list(world.checkpoints)).stopped
    newest = world.store[max(world.store)]
    assert newest[0].batch == LAST and newest[1] == tuple(range(1, LAST + 1))
    assert max(world.checkpoints).batch == LAST, "the end has its checkpoint"


WHOLE_LIFE = 1 + LAST * 2 + LAST // EVERY + 1
"""Durable actions of a life that nobody ends."""


def lives(world: World, budgets: tuple[int, ...]) -> Iterator[None]:
    for budget in budgets:
        world.budget = budget
        with contextlib.suppress(Died):
            live(world)
        check(world)
        yield


def test_a_life_without_a_death_takes_the_actions_counted_here() -> None:
    world = World(budget=1000)
    live(world)
    assert 1000 - world.budget == WHOLE_LIFE
    check(world)


@pytest.mark.parametrize("beside", [False, True], ids=["checkpoint first", "checkpoint beside"])
@pytest.mark.parametrize("first", range(WHOLE_LIFE + 1))
def test_two_deaths_anywhere_lose_and_repeat_nothing(first: int, beside: bool) -> None:
    for second in range(WHOLE_LIFE + 1):
        world = World(beside=beside)
        for _ in lives(world, (first, second)):
            pass
        finish(world)


@pytest.mark.parametrize("beside", [False, True], ids=["checkpoint first", "checkpoint beside"])
@pytest.mark.parametrize("first", range(2, WHOLE_LIFE + 1))
def test_lost_checkpoints_cost_only_batches_trained_again(first: int, beside: bool) -> None:
    """After the first life the newest, all, or the base of a rollback are gone; then a rollback, and another death."""
    for target, second, lost in product((None, 0, 2), range(WHOLE_LIFE), ("newest", "all", "base")):
        world = World(beside=beside)
        for _ in lives(world, (first,)):
            pass
        if isinstance(world.steps[-1] if world.steps else None, Stop):
            continue
        if target is not None and (target == 0 or any(p.version <= target for p in world.checkpoints)):
            world.budget = 1
            roll_back(world, target)
        base = seen_in(world.steps).base
        gone = {"newest": sorted(world.checkpoints)[-1:], "all": list(world.checkpoints), "base": [base]}[lost]
        for point in gone:
            world.checkpoints.pop(point, None)  # type: ignore[arg-type]
        for _ in lives(world, (second,)):
            pass
        finish(world)


@pytest.mark.parametrize("budgets", list(product((0, 1, 2), repeat=4)))
def test_lives_of_a_few_actions_each_still_come_to_the_end(budgets: tuple[int, ...]) -> None:
    world = World()
    for _ in lives(world, budgets):
        pass
    finish(world)


@pytest.mark.parametrize("target", [0, 1, 2, 3])
@pytest.mark.parametrize("before", range(2, WHOLE_LIFE))
def test_a_rollback_at_any_time_trains_on_from_its_base_whatever_dies_after_it(before: int, target: int) -> None:
    for after in range(WHOLE_LIFE):
        world = World()
        for _ in lives(world, (before,)):
            pass
        if world.head is None or isinstance(world.steps[-1] if world.steps else None, Stop):
            continue
        world.budget = 1
        held = [p.version for p in world.checkpoints]
        if target and not [v for v in held if v <= target]:
            continue
        roll_back(world, target)
        base = seen_in(world.steps).base
        assert base is not None and (base.version <= target or target == 0)
        for _ in lives(world, (after,)):
            pass
        finish(world)
        resumed = [r for r in world.steps if isinstance(r, Resumed)]
        assert [(r.lineage, r.batch) for r in resumed] == [(1, base.batch)], "the base is announced once"
        assert {s.lineage for b, s in final_steps(world.steps).items() if b > base.batch} == {1}


def test_rollbacks_upon_rollbacks_each_begin_a_lineage() -> None:
    world = World()
    for _ in lives(world, (8,)):
        pass
    for expected in (1, 2, 3):
        world.budget = 1
        roll_back(world, 2)
        for _ in lives(world, (3,)):
            pass
        assert seen_in(world.steps).lineage == expected
    finish(world)


def all_states() -> Iterator[tuple[StepsSeen, Point | None, list[Point]]]:
    """Small states, also those that no history leads to."""
    points = [Point(lineage=line, batch=batch, version=batch + line) for line in (0, 1) for batch in (0, 1, 2)]
    back = Rollback(policy=0, lineage=1, base_lineage=0, base_batch=1, base_version=1)
    for head in (None, *points):
        for chosen in product((False, True), repeat=4):
            checkpoints = [p for p, taken in zip(points[1:3] + points[4:6], chosen, strict=True) if taken]
            for rollback in (None, back):
                for announced in (frozenset[int](), frozenset({1}), frozenset({1, 2}), frozenset({1, 2, 3})):
                    backs = (rollback,) if rollback else ()
                    yield StepsSeen(rollbacks=backs, announced=announced), head, checkpoints


def test_every_small_state_gives_a_plan_that_keeps_the_rules_or_is_refused_in_words() -> None:
    plans, refused = 0, 0
    for seen, head, checkpoints in all_states():
        try:
            plan = decide(seen, head, checkpoints)
        except ConfigurationError as error:
            assert "lineage" in str(error) or "store.url" in str(error)
            refused += 1
            continue
        plans += 1
        if plan.first:
            assert head is None and not checkpoints and not seen.announced
            continue
        assert head is not None
        _keeps_the_rules(plan, seen, head, checkpoints)
    assert plans > 400 and refused > 100


def _keeps_the_rules(plan: Plan, seen: StepsSeen, head: Point, checkpoints: list[Point]) -> None:
    assert plan.lineage == seen.lineage
    assert plan.start is None or plan.start in checkpoints
    if plan.start is not None and plan.start.lineage == plan.lineage:
        assert plan.start == max(p for p in checkpoints if p.lineage == plan.lineage)
    assert not (plan.publish and plan.announce), "the head is the loaded weights, or it is not"
    if plan.publish:
        assert (plan.lineage, plan.retrain_to) > (head.lineage, head.batch), "nothing is published twice"
        base = seen.base.batch if seen.base and plan.lineage > head.lineage else 0
        assert plan.retrain_to == max(plan.start_batch, base), "the base of a rollback is reached, nothing beyond it"
    else:
        assert plan.retrain_to == head.batch, "what has been published is trained again, without publishing"
    if plan.announce:
        assert head.version not in seen.announced and head.version > 0
