"""Runs of the real parts on a simulated cluster: whatever dies, stands still, comes twice or is away, nothing is lost.

``HEADRACE_SIM_PROFILE=long`` plays some hundred times as many runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from flow_world import PolicyPlan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_plans import CLUSTER_FAULTS, cluster_plan, trainer_plan, whole_plan
from sim_world import ClusterPlan, ClusterWorld

from headrace.schemas.errors import Superseded
from headrace.schemas.records import Manifest, Resumed, Rollback, Step
from headrace.trainers.batch_to_step import Rewind

LONG = os.environ.get("HEADRACE_SIM_PROFILE") == "long"
settings.register_profile("sim-quick", max_examples=8, derandomize=True)
settings.register_profile("sim-long", max_examples=400)
SETTINGS = settings(
    settings.get_profile("sim-long" if LONG else "sim-quick"), deadline=None, suppress_health_check=list(HealthCheck)
)
OPERATORS = ("schedule.w0", "assemble.w0", "batch.w0")


def ids(of_all: int, quick: int) -> list[int]:
    """Seeds to try: a few of them, or all."""
    return list(range(of_all)) if LONG else list(range(quick))


@st.composite
def plans(draw: st.DrawFn) -> ClusterPlan:
    """A small run on a cluster, with operators that die at given calls and faults at random times."""
    policy = PolicyPlan(
        batch=draw(st.integers(1, 3)),
        depth=draw(st.sampled_from([0, 0.5, 1, 2])),
        replay=draw(st.sampled_from([0, 0, 0.5])),
        mode=draw(st.sampled_from(["wait", "drop"])),
    )
    return ClusterPlan(
        seed=draw(st.integers(0, 10_000)),
        policies=[policy],
        members=draw(st.sampled_from([1, 1, 2])),
        prompts=draw(st.integers(1, 10)),
        parts=draw(st.integers(1, 2)),
        group_size=draw(st.integers(1, 3)),
        workers=draw(st.integers(1, 2)),
        faults=tuple(draw(st.sets(st.sampled_from(CLUSTER_FAULTS), max_size=4))),
        mtbf_ms=draw(st.sampled_from([2000, 6000])),
        fault_end_ms=20_000,
        kill_steps=draw(st.dictionaries(st.sampled_from(OPERATORS), st.integers(0, 600), max_size=2)),
        limit_ms=600_000,
    )


@SETTINGS
@given(plan=plans())
def test_a_run_on_a_cluster_keeps_every_invariant(plan: ClusterPlan) -> None:
    assert ClusterWorld(plan).play().violations() == []


@pytest.mark.parametrize("seed", ids(300, 3))
def test_runs_with_every_fault_of_processes_and_broker(seed: int) -> None:
    assert ClusterWorld(cluster_plan(seed)).play().violations() == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_worker_may_die_at_any_call(operator: str) -> None:
    """Before and after each effect on the cluster: every call is two steps."""

    def play(step: int) -> ClusterWorld:
        plan = ClusterPlan(prompts=2, parts=1, policies=[PolicyPlan(batch=1)], workers=1, group_size=1, task_ms=100)
        plan.kill_steps = {operator: step}
        return ClusterWorld(plan).play()

    calm = play(-1)
    name, number = operator.split(".w")
    steps = calm.driver.tasks[name, int(number)].processes[0].steps
    assert calm.violations() == [] and steps > 50
    for step in range(0, steps, 1 if LONG else steps // 4):
        world = play(step)
        assert world.violations() == [], f"it dies at step {step}"
        assert len(world.driver.tasks[name, int(number)].processes) == 2
        trained = [m.group for r in world.driver.records("manifests", 0) if isinstance(r, Manifest) for m in r.members]
        assert sorted(trained) == [0, 1]


@pytest.mark.parametrize("seed", ids(200, 2))
def test_real_trainers_keep_lineage_and_versions(seed: int, tmp_path: Path) -> None:
    world = ClusterWorld(trainer_plan(seed, str(tmp_path))).play()
    assert world.violations() == []
    assert any(isinstance(r, Step) for r in world.driver.records("steps", 0))


@pytest.mark.parametrize("seed", ids(200, 2))
def test_a_run_of_real_parts_only(seed: int, tmp_path: Path) -> None:
    assert ClusterWorld(whole_plan(seed, str(tmp_path))).play().violations() == []


def test_a_trainer_that_stands_still_while_it_starts_gives_way_to_one_that_goes_back(tmp_path: Path) -> None:
    """Frozen at any call between fencing and its decision, it must find that it is fenced, not a damaged run."""
    ends: list[Any] = []
    for step in range(10, 44) if LONG else range(18, 30, 4):
        plan = ClusterPlan(folder=str(tmp_path / str(step)), prompts=40, group_size=1, limit_ms=300_000)
        plan.policies = [PolicyPlan(batch=1, step_ms=100)]
        world = ClusterWorld(plan)
        trainer = world.trainers[0]

        def overtake(trainer: Any = trainer, step: int = step) -> None:
            trainer.live.kill()
            trainer.start()
            trainer.live.freeze_at = (step, 12.0)

        world.at(3000, overtake)
        world.at(8000, lambda trainer=trainer: trainer.start(Rewind(version=0)))
        assert world.play().violations() == [], f"frozen at step {step}"
        ends += [type(process.error) for process in trainer.processes]
    assert Superseded in ends


def test_who_completes_the_going_back_of_another_discards_as_it_was_asked_to(tmp_path: Path) -> None:
    """Killed at any call between Rollback and Resumed, its place is taken by one that knows nothing of the request."""
    completed = 0
    for step in range(30, 62) if LONG else (40, 48):
        plan = ClusterPlan(folder=str(tmp_path / str(step)), prompts=6, group_size=1, limit_ms=300_000)
        plan.policies = [PolicyPlan(batch=1, step_ms=100)]
        world = ClusterWorld(plan)
        trainer, begun = world.trainers[0], list[tuple[int, int]]()

        def go_back(trainer: Any = trainer, step: int = step) -> None:
            trainer.live.kill()
            trainer.start(Rewind(version=0, discard=True))
            trainer.live.kill_at = step

        def again(rewind: Rewind | None, trainer: Any = trainer, begun: Any = begun) -> None:
            begun.append((len(trainer.records(Rollback)), len(trainer.records(Resumed))))
            trainer.start(rewind)

        trainer._again = again
        world.at(3000, go_back)
        assert world.play().violations() == [], f"killed at step {step}"
        assert [r.discard for r in trainer.records(Resumed)] == [True], f"killed at step {step}"
        completed += (1, 0) in begun
    assert completed > 1
