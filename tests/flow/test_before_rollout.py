"""Runs with operators before rollout, on finite sets and through crashes: they end, credits are exact, shares met."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from data_world import DataPlan, DataWorld, data_violations
from flow_world import PolicyPlan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.schemas.records import Admission, Closed, End, Group, Manifest, Skipped

OPERATORS: list[list[dict[str, Any]]] = [
    [{"type": "greso"}],
    [{"type": "greso", "preset": "greso_repo", "hard_reward": 0.0}],
    [{"type": "greso", "preset": "astraflow", "max_skips": 3}],
    [{"type": "filter_solved", "decay": 0.2, "threshold": 0.7}],
    [{"type": "mix", "by": "task_type", "weights": {"even": 1, "odd": 2}, "max_skips": 0}],
    [{"type": "curriculum", "ceiling": [[0, 2], [3, 9]]}, {"type": "greso"}],
    [{"type": "admission", "alpha": 1.5}, {"type": "replicate", "extra": 1}, {"type": "accept_all"}],
]


@st.composite
def plans(draw: st.DrawFn) -> DataPlan:
    """Sizes that divide nothing, groups that fail or close short, data of which nearly all is filtered, crashes."""
    operators = draw(st.sampled_from(OPERATORS))
    alpha = operators[0].get("alpha", -1.0)
    policy = PolicyPlan(
        batch=draw(st.integers(1, 5)),
        depth=alpha if alpha >= 0 else draw(st.sampled_from([0, 0.5, 1, 2])),
        mode=draw(st.sampled_from(["wait", "drop"])),
        last=draw(st.sampled_from(["train", "drop"])),
        max_steps=draw(st.sampled_from([0, 0, 3])),
        extra=draw(st.sampled_from([0, 2])),
    )
    return DataPlan(
        seed=draw(st.integers(0, 10_000)),
        policies=[policy],
        operators=operators,
        prompts=draw(st.integers(1, 15)),
        epochs=draw(st.integers(1, 4)),
        group_size=draw(st.integers(2, 4)),
        extra_replicas=draw(st.integers(0, 1)),
        retries=draw(st.integers(0, 1)),
        flaky=draw(st.sampled_from([0, 0.3])),
        zero_variance=draw(st.sampled_from([-1, 0.5, 0.99])),
        stage_crash=draw(st.sampled_from([0.0, 0.05])),
        fault_end_ms=draw(st.sampled_from([0, 60_000])),
        workers=draw(st.integers(1, 3)),
        task_ms=200,
    )


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans())
def test_every_run_ends_with_each_prompt_and_each_credit_ended_once(plan: DataPlan) -> None:
    assert data_violations(DataWorld(plan).play()) == []


def skipped(world: DataWorld) -> list[Skipped]:
    return [r for r in world.driver.records("ledger") if isinstance(r, Skipped)]


def admissions(world: DataWorld) -> list[Admission]:
    found = [r for r in world.driver.records("admissions") if isinstance(r, Admission)]
    return sorted(found, key=lambda a: a.group)


def test_greso_on_data_of_which_99_percent_has_no_variance_ends_and_saves() -> None:
    plan = DataPlan(
        prompts=40, epochs=6, zero_variance=0.99, group_size=4, policies=[PolicyPlan(batch=7)], task_ms=100,
        operators=[{"type": "greso"}],
    )  # fmt: skip
    world = DataWorld(plan).play()
    assert data_violations(world) == []
    assert isinstance(world.driver.records("manifests", 0)[-1], End)
    names = Counter(r.reason for r in skipped(world))
    assert set(names) == {"probably_easy"} and sum(names.values()) > 60
    assert all("groups in a row were easy" in r.detail for r in skipped(world))


def test_an_operator_that_drops_everything_cannot_stop_a_run() -> None:
    plan = DataPlan(
        prompts=20, epochs=5, operators=[{"type": "curriculum", "ceiling": [[0, -1]], "max_skips": 9}],
    )  # fmt: skip
    world = DataWorld(plan).play()
    assert data_violations(world) == []
    assert len(admissions(world)) == 10 and len(skipped(world)) == 90
    assert world.driver.metrics.total("prompts_forced") == 10


@pytest.mark.parametrize("last", ["train", "drop"])
def test_the_last_short_batch_is_trained_or_ends_by_name(last: str) -> None:
    plan = DataPlan(prompts=13, epochs=2, policies=[PolicyPlan(batch=4, last=last)])
    world = DataWorld(plan).play()
    assert data_violations(world) == []
    sizes = [r.fresh_groups for r in world.driver.records("manifests") if isinstance(r, Manifest)]
    ended = [r for r in world.driver.records("ledger") if isinstance(r, Closed) and r.reason == "end"]
    assert (sizes, len(ended)) == (([4] * 6 + [2], 0) if last == "train" else ([4] * 6, 2))


def test_a_run_that_ends_by_samples_trains_them_and_ends_the_rest_by_name() -> None:
    plan = DataPlan(prompts=99, epochs=9, group_size=3, policies=[PolicyPlan(batch=4, depth=2)], max_samples=50)
    world = DataWorld(plan).play()
    assert data_violations(world) == []
    manifests = [r for r in world.driver.records("manifests") if isinstance(r, Manifest)]
    assert [m.trajectories for m in manifests] == [12] * 5, "the batch in which 50 are reached is the last"
    end = world.driver.records("manifests", 0)[-1]
    assert isinstance(end, End) and end.reason == "samples"
    assert any(isinstance(r, Closed) and r.reason == "end" for r in world.driver.records("ledger"))


def test_groups_that_close_short_are_trained_and_teach_nothing() -> None:
    plan = DataPlan(
        prompts=30, epochs=2, group_size=3, flaky=0.25, zero_variance=1.0, policies=[PolicyPlan(batch=3)], retries=0,
        operators=[{"type": "greso"}],
    )  # fmt: skip
    world = DataWorld(plan).play()
    assert data_violations(world) == []
    short = [r for r in world.driver.records("ledger") if isinstance(r, Closed) and not r.complete]
    assert len(short) > 10
    assert world.driver.metrics.total("outcomes_ignored") >= len([r for r in short if r.reason == "filtered"]) > 3


@pytest.mark.parametrize("missing", ["wait", "lend"])
def test_streams_are_mixed_exactly_until_one_ends(missing: str) -> None:
    mix = {"type": "mix", "weights": {"a": 3, "b": 1}, "missing": missing}
    plan = DataPlan(streams=("a", "b"), prompts=60, operators=[mix], policies=[PolicyPlan(batch=4)], workers=3)
    world = DataWorld(plan).play()
    assert data_violations(world) == []
    order = [a.stream for a in admissions(world)]
    assert Counter(order) == {"a": 60, "b": 60}
    if missing == "wait":
        assert all(abs(order[:n].count("a") - 0.75 * n) <= 1 for n in range(1, 81)), order
    assert order[80:] == ["b"] * 40


def test_one_seed_gives_one_order_whatever_the_sources_do() -> None:
    mix = {"type": "mix", "weights": {"a": 2, "b": 1}}
    orders = set()
    for seed in range(3):
        plan = DataPlan(seed=seed, streams=("a", "b"), prompts=20, operators=[mix], workers=3)
        orders.add(tuple((a.stream, a.prompt_id) for a in admissions(DataWorld(plan).play())))
    assert len(orders) == 1


def test_two_policies_teach_once_for_each_group() -> None:
    plan = DataPlan(
        prompts=12, epochs=3, zero_variance=0.6, policies=[PolicyPlan(batch=2), PolicyPlan(batch=3)],
        operators=[{"type": "filter_solved", "decay": 0.0, "threshold": 1.0}],
    )  # fmt: skip
    world = DataWorld(plan).play()
    assert data_violations(world) == []
    kept = {r.group for p in (0, 1) for r in world.driver.records("groups", p) if isinstance(r, Group)}
    assert kept and skipped(world)
