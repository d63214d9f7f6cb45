"""A simulated run: the product's promises hold in it, times can be worked out by hand, same plan is same run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline.simulation.plan import Plan
from headrace.pipeline.simulation.world import Stalled, World, simulate
from headrace.schemas.records import Admission, Batched, Cancel, Manifest, Opened, Trajectory


def plan(**sections: Any) -> Plan:
    data: dict[str, Any] = {
        "work": {"batch_groups": 4, "group_size": 2, "length": 10},
        "machines": {"engines": 2, "slots": 4, "step_seconds": 1.0, "row_seconds": 0.0, "train_seconds": 5.0},
        "flow": {"depth": 0},
        "steps": 4, "warm_up": 1,
    }  # fmt: skip
    for name, value in sections.items():
        data[name] = {**data[name], **value} if isinstance(value, dict) else value
    return Plan.model_validate(data)


def test_a_synchronous_step_is_its_rollouts_and_its_training() -> None:
    """8 tasks of 10 s on 8 slots, then 5 s of training."""
    found = simulate(plan())
    assert found.step_seconds == pytest.approx(15.0, abs=0.3)
    assert (found.mean_staleness, found.max_staleness) == (0.0, 0)
    assert found.wait_share == pytest.approx(10 / 15, abs=0.03)


def test_a_step_that_runs_ahead_takes_the_slower_of_the_two() -> None:
    rollouts = simulate(plan(flow={"depth": 1}, steps=8, warm_up=3))
    assert rollouts.step_seconds == pytest.approx(10.0, abs=0.3)
    training = simulate(plan(flow={"depth": 1}, machines={"train_seconds": 25.0}, steps=8, warm_up=3))
    assert training.step_seconds == pytest.approx(25.0, abs=0.3)
    assert training.wait_share < 0.02


def test_the_same_plan_is_the_same_run_and_another_seed_another() -> None:
    varied = plan(work={"length": "lognormal(10, 0.8)"}, flow={"depth": 1})
    first, second = simulate(varied), simulate(varied)
    assert first == second
    assert simulate(varied.with_(seed=1)).step_seconds != first.step_seconds


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10_000), depth=st.sampled_from([0, 0.5, 1, 2]), more=st.integers(0, 3), extra=st.integers(0, 3),
    replicas=st.integers(0, 2), rate=st.sampled_from([1.0, 0.6]), mode=st.sampled_from(["wait", "drop"]),
    hangs=st.sampled_from([0.0, 0.1]), policies=st.sampled_from([1, 2]),
)  # fmt: skip
def test_caps_and_bounds_of_the_protocol_hold_in_every_run(
    seed: int, depth: float, more: int, extra: int, replicas: int, rate: float, mode: str, hangs: float, policies: int
) -> None:
    """Admission within the cap, staleness within A, no group in two batches, batches of exactly B groups."""
    bound = int(np.ceil(depth)) + more if depth else -1
    world = World(
        plan(
            work={"length": "lognormal(10, 1.0)", "pass_rate": rate, "fail_stop": hangs,
                  "turns": policies, "policies": list(range(policies))},
            flow={"depth": depth, "max_staleness": bound, "mode": mode, "extra_groups": extra,
                  "extra_replicas": replicas, "policies": policies},
            seed=seed,
        )
    ).play()  # fmt: skip
    for policy in range(policies):
        seen: set[int] = set()
        for manifest in world.driver.records("manifests", policy):
            assert isinstance(manifest, Manifest)
            groups = {m.group for m in manifest.members}
            assert manifest.groups == 4 and not groups & seen
            seen |= groups
            oldest = min(m.oldest_version for m in manifest.members)
            assert manifest.start_version - oldest <= (bound if depth else 0)
        ledger = world.driver.records("ledger", policy)
        least = 0.25 if rate < 1 else 1.0
        cap = int(np.ceil(((1 + depth) * 4 + extra) / least - 1e-9))
        assert {r.cap for r in ledger if isinstance(r, Opened)} == {cap}
        batched = [g for r in ledger if isinstance(r, Batched) for g in r.groups]
        assert len(batched) == len(set(batched))


def test_spare_groups_go_on_being_spare_in_every_synchronous_batch() -> None:
    """Nothing opens while a batch trains: what opened then would be stale, and no spare group any more."""
    world = World(plan(flow={"extra_groups": 2}, work={"length": "lognormal(10, 1.0)"}, steps=6)).play()
    admitted = [r for r in world.driver.records("admissions") if isinstance(r, Admission)]
    versions = [a.policies[0].min_version for a in admitted]
    assert [versions.count(v) for v in range(5)] == [6] * 5


def test_what_a_closed_group_leaves_over_is_cancelled_and_leaves_its_engine() -> None:
    world = World(
        plan(work={"length": "lognormal(10, 1.2)"}, flow={"extra_groups": 2, "extra_replicas": 2}, steps=3)
    ).play()
    cancelled = {(r.group, r.replica) for r in world.driver.records("tasks") if isinstance(r, Cancel)}
    reported = {(r.group, r.replica) for r in world.driver.records("trajectories") if isinstance(r, Trajectory)}
    assert cancelled
    assert len(cancelled & reported) <= len(cancelled) // 4  # only what ended within the hops of its Cancel
    started = sum(world.draw(g).tokens[r, 0] for g, r in world.issued)
    made = sum(engine.tokens for worker in world.workers for engine in worker.engines)
    assert made < 0.95 * started


def test_spare_groups_are_carried_over_when_rollouts_run_ahead() -> None:
    """At depth 1 with A = 4 a group that a batch does not take is taken by a later one: nothing is thrown away."""
    found = simulate(
        plan(work={"length": "lognormal(10, 0.8)"}, flow={"depth": 1, "max_staleness": 4, "extra_groups": 2}, steps=10)
    )
    assert found.lost_groups.get("stale", 0) <= 1
    assert found.max_staleness >= 1


def test_a_hung_environment_ends_at_its_deadline_and_its_group_closes_without_it() -> None:
    found = simulate(plan(work={"fail_stop": 0.3}, flow={"task_deadline_seconds": 40, "min_members": 1}, seed=4))
    assert found.step_seconds > 40
    assert any(step.members < 8 for step in found.steps)


def test_turns_of_two_policies_are_sampled_one_after_the_other_and_each_trains_its_own() -> None:
    world = World(plan(work={"turns": 2, "policies": [0, 1]}, flow={"policies": 2})).play()
    assert world.outcome().step_seconds == pytest.approx(25.0, abs=0.4)
    assert world.length_of(0, 0, 0) == world.length_of(0, 0, 1) == 10.0


def test_workers_join_and_leave_while_it_runs() -> None:
    def change(world: World) -> None:
        if len(world.trainers[0].steps) == 2:
            world.join()
        if len(world.trainers[0].steps) == 5:
            world.shrink()

    world = World(plan(work={"batch_groups": 8}, flow={"depth": 1}, steps=8, warm_up=0), change).play()
    made = [worker.reported for worker in world.workers]
    assert len(made) == 3 and all(made)
    assert world.engines() == 2 and not world.workers[2].alive


def test_a_run_that_cannot_move_says_what_it_waits_for() -> None:
    stuck = plan(work={"fail_stop": 0.99}, flow={"task_deadline_seconds": 5, "min_members": 2}, seed=1)
    with pytest.raises(Stalled, match=r"policy 0: \d of 4 steps; .* groups closed"):
        simulate(stuck)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"warm_up": 4}, "nothing would be measured"),
        ({"work": {"policies": [0, 1]}}, "names policy 1"),
        ({"machines": {"step_seconds": 0}}, "needs time for a token"),
        ({"machines": {"speeds": [0.0]}}, "above 0"),
        ({"work": {"lenght": 3}}, "Extra inputs"),
    ],
)
def test_what_cannot_be_simulated_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(**sections)
