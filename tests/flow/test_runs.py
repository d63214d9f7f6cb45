"""Whole runs of the three stages in virtual time: random ones with faults, and the ones that must simply end."""

from __future__ import annotations

from collections import Counter

import flow_world
import pytest
from flow_check import violations
from flow_world import Plan, PolicyPlan, World, random_plan

from headrace.schemas.records import (
    Admission,
    Closed,
    End,
    EvalResult,
    Manifest,
    Opened,
    RunEnd,
    Stop,
    Task,
    Trained,
)


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_runs_keep_every_invariant(first: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + 20):
        world = World(random_plan(seed)).play()
        assert violations(world) == [], f"seed {seed}"
        happened.update(world.stats)
    assert happened["stage crashes"] and happened["rollbacks"] and happened["tasks done"] > 500


@pytest.mark.parametrize(
    "kind", ["tight_plan", "replay_plan", "stuck_plan", "outage_plan", "hanging_plan", "rollback_plan"]
)
def test_pressing_runs_keep_every_invariant(kind: str) -> None:
    for seed in range(15):
        assert violations(World(getattr(flow_world, kind)(seed)).play()) == [], f"seed {seed}"


def test_random_runs_have_every_fault_and_feature() -> None:
    plans = [random_plan(seed) for seed in range(200)]
    faults = {fault for plan in plans for fault in plan.faults}
    assert faults == {"kill", "freeze", "twin", "all_workers", "rollback", "stage", "stuck", "outage", "trainer"}
    assert sum(plan.scored for plan in plans) > 20
    assert sum(plan.zero_variance >= 0 for plan in plans) > 50
    assert sum(len(plan.policies) == 2 for plan in plans) > 30


def test_finite_data_with_dynamic_sampling_ends() -> None:
    world = World(Plan(prompts=40, group_size=4, zero_variance=0.5, policies=[PolicyPlan(batch=4)])).play()
    assert violations(world) == []
    closed = [r for r in world.driver.records("ledger") if isinstance(r, Closed)]
    assert sum(r.reason == "filtered" for r in closed) > 5
    filtered = next(r for r in closed if r.reason == "filtered")
    assert filtered.operator == "dynamic_sampling"
    assert filtered.detail == "zero_variance: all 4 rewards are 1"
    assert isinstance(world.driver.records("manifests", 0)[-1], End)


def test_data_of_which_99_percent_is_filtered_ends() -> None:
    world = World(Plan(prompts=300, zero_variance=0.99, policies=[PolicyPlan(batch=4)], task_ms=100)).play()
    assert violations(world) == []
    trained = sum(len(r.members) for r in world.driver.records("manifests") if isinstance(r, Manifest))
    assert trained < 30


def test_nothing_but_filtered_groups_ends_without_a_batch() -> None:
    world = World(Plan(prompts=30, zero_variance=1.0)).play()
    assert violations(world) == []
    assert not any(isinstance(r, Manifest) for r in world.driver.records("manifests"))


def test_a_run_that_ends_by_steps_closes_what_is_left_as_end() -> None:
    world = World(Plan(prompts=200, policies=[PolicyPlan(batch=4, max_steps=3, depth=2)])).play()
    assert violations(world) == []
    assert sum(isinstance(r, Closed) and r.reason == "end" for r in world.driver.records("ledger")) > 0
    assert max(r.version for r in world.driver.records("ledger") if isinstance(r, Trained)) == 3


def test_depth_0_trains_on_its_own_version_only_also_with_slow_weights() -> None:
    plan = Plan(prompts=40, policies=[PolicyPlan(batch=4, depth=0)], workers=3, load_ms=(2000, 6000))
    world = World(plan).play()
    assert violations(world) == []
    manifests = [r for r in world.driver.records("manifests") if isinstance(r, Manifest)]
    assert len(manifests) == 10
    assert all(m.oldest_version == r.start_version for r in manifests for m in r.members)
    for r in manifests:
        groups = list(dict.fromkeys(m.group for m in r.members))
        assert sorted(groups) == list(range(4 * (r.batch - 1), 4 * r.batch)), "batches go by admission"


def test_a_standing_trainer_stops_no_other_policy() -> None:
    policies = [PolicyPlan(batch=2), PolicyPlan(batch=3)]
    assert violations(World(Plan(prompts=40, policies=policies, hold=True)).play()) == []


def test_evaluations_come_at_the_start_along_the_way_and_at_the_end() -> None:
    plan = Plan(prompts=24, heldout=3, eval_every=2, policies=[PolicyPlan(batch=4, max_steps=5)])
    world = World(plan).play()
    assert violations(world) == []
    tasks = [r for r in world.driver.records("tasks") if isinstance(r, Task) and r.kind == "eval"]
    assert sorted({t.policies[0].min_version for t in tasks}) == [0, 2, 4, 5]
    assert len({(t.group, t.replica) for t in tasks}) == 3 * 4
    results = [r for r in world.driver.records("evals") if isinstance(r, EvalResult)]
    assert len(results) == 12
    assert all(r.oldest_version == 0 for r in results if r.version == 0)


def test_the_end_mark_stands_with_the_stops_and_after_everything() -> None:
    world = World(Plan()).play()
    assert violations(world) == []
    driver = world.driver
    (mark,) = driver.log["run", 0]
    assert isinstance(mark.record, RunEnd) and mark.key == b"end"
    for topic in ("admissions", "tasks"):
        for partition in range(driver.partitions[topic]):
            last = driver.log[topic, partition][-1]
            assert isinstance(last.record, Stop) and last.timestamp_ms == mark.timestamp_ms


def test_a_failed_group_is_admitted_once_more_and_then_lost_by_name() -> None:
    world = World(Plan(prompts=4, flaky=1.0, group_size=2, policies=[PolicyPlan(batch=2)])).play()
    assert violations(world) == []
    admissions = [r for r in world.driver.records("admissions") if isinstance(r, Admission)]
    assert sorted(a.retry for a in admissions) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert max(a.group for a in admissions if a.retry == 0) < min(a.group for a in admissions if a.retry == 1)
    assert world.driver.metrics.counters["dropped_total", (("reason", "prompt_lost"), ("topic", "prompts"))] == 4
    opened = [r for r in world.driver.records("ledger") if isinstance(r, Opened)]
    assert len(opened) == 8
