"""Several policies in one run, in virtual time: no barrier between them, and a frozen one that is only played with."""

from __future__ import annotations

from collections import Counter

import pytest
from flow_check import violations
from flow_world import Plan, PolicyPlan, World

from headrace.pipeline.report_policies import policy_figures, unclaimed
from headrace.pipeline.tally import TALLY_TOPICS, Tally
from headrace.schemas.records import Admission, Kept, Opened, RunEnd, Step, Stop, Task, Trajectory

PAUSE_FROM, PAUSE_MS = 20_000, 60_000


def tallied(world: World) -> Tally:
    """What the report reads of a run."""
    tally = Tally()
    for topic in TALLY_TOPICS:
        for record in world.driver.records(topic):
            tally.fold(record)
    return tally


def two(*, pause: bool, pacing: str = "any") -> World:
    """Two policies that train at their own pace for longer than a minute; the first may stand still for one."""
    plan = Plan(
        prompts=900, pacing=pacing, workers=4, slots=4, task_ms=200,
        policies=[PolicyPlan(batch=2, step_ms=400), PolicyPlan(batch=3, step_ms=500)],
    )  # fmt: skip
    world = World(plan)
    if pause:
        world.at(PAUSE_FROM, lambda: world.trainers[0].pause(PAUSE_MS))
    return world.play()


def steps_in_pause(world: World, policy: int) -> int:
    """Steps that a policy wrote while the first one's trainer stood, a second at both ends left out."""
    begin = world.start_ms + PAUSE_FROM + 1000
    return sum(
        isinstance(entry.record, Step) and begin <= entry.timestamp_ms < begin + PAUSE_MS - 2000
        for entry in world.driver.log["steps", policy]
    )


def test_while_one_trainer_stands_for_a_minute_the_other_keeps_its_rate_and_what_was_not_claimed_is_named() -> None:
    calm, paused = two(pause=False), two(pause=True)
    assert violations(calm) == [] and violations(paused) == []
    assert steps_in_pause(paused, 0) == 0 and steps_in_pause(calm, 0) > 50
    assert steps_in_pause(paused, 1) >= 0.95 * steps_in_pause(calm, 1) > 40
    missed = unclaimed(paused.config, 0, tallied(paused))
    opened = {r.group for r in paused.driver.records("ledger", 1) if isinstance(r, Opened)}
    own = {r.group for r in paused.driver.records("ledger", 0) if isinstance(r, Opened)}
    assert missed == len(opened - own) > 100
    first, second = policy_figures(paused.config, tallied(paused))
    assert (first.unclaimed, second.unclaimed) == (missed, len(own - opened))
    assert f"{missed} groups not claimed" in first.summary()
    counted = paused.driver.metrics.counters["unclaimed", (("stream", "main"),)]
    assert counted >= missed, "the metric counts as it happens what the report finds in the ledgers"


def test_with_pacing_all_a_standing_trainer_stops_the_other_too() -> None:
    """The barrier that a person may ask for."""
    world = two(pause=True, pacing="all")
    assert violations(world) == []
    assert steps_in_pause(world, 1) < 10
    assert unclaimed(world.config, 0, tallied(world)) == 0


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_policy_is_played_with_and_never_trained(frozen: int) -> None:
    policies = [PolicyPlan(batch=2), PolicyPlan(batch=2)]
    policies[frozen].frozen = True
    world = World(Plan(prompts=24, policies=policies, heldout=2, eval_every=2)).play()
    assert violations(world) == []
    driver = world.driver
    trained = 1 - frozen
    assert sum(isinstance(r, Step) for r in driver.records("steps", trained)) == 12
    assert [type(r) for r in driver.records("steps", frozen)] == [Stop]
    assert not any(isinstance(r, Opened | Kept) for r in driver.records("ledger", frozen))
    assert driver.records("groups", frozen) == [] and driver.records("manifests", frozen) == []
    tasks = [r for r in driver.records("tasks") if isinstance(r, Task)]
    assert all({b.policy for b in t.policies} == {0, 1} for t in tasks if t.kind == "train")
    assert all(t.policies[0].policy == trained for t in tasks if t.kind == "eval")
    trajectories = [r for r in driver.records("trajectories") if isinstance(r, Trajectory) and r.status == "train"]
    assert all({s.policy for s in t.sequences} == {0, 1} for t in trajectories)
    admissions = [r for r in driver.records("admissions") if isinstance(r, Admission)]
    assert {p.policy for a in admissions for p in a.policies} == {trained}
    assert isinstance(driver.records("run")[-1], RunEnd)
    figures = policy_figures(world.config, tallied(world))
    assert (figures[frozen].frozen, figures[frozen].unclaimed, figures[frozen].versions) == (True, 0, 0)
    assert figures[frozen].summary() == f"p{frozen}: frozen"


def test_a_frozen_policy_survives_faults() -> None:
    happened: Counter[str] = Counter()
    for seed in range(6):
        policies = [PolicyPlan(batch=2), PolicyPlan(batch=2, frozen=True)]
        plan = Plan(
            seed=seed, prompts=24, policies=policies, faults=("kill", "twin", "stage", "trainer"), mtbf_ms=5000,
            fault_end_ms=60_000, stage_crash=0.01,
        )  # fmt: skip
        world = World(plan).play()
        assert violations(world) == [], f"seed {seed}"
        happened.update(world.stats)
    assert happened["stage crashes"]


def test_policies_have_their_own_cadence() -> None:
    plan = Plan(prompts=60, policies=[PolicyPlan(batch=1, step_ms=100), PolicyPlan(batch=5, step_ms=1500)])
    world = World(plan).play()
    assert violations(world) == []
    counts = [sum(isinstance(r, Step) for r in world.driver.records("steps", policy)) for policy in (0, 1)]
    assert counts[0] >= 1.5 * counts[1] > 10
