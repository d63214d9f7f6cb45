"""The models that the papers compare with, against cases that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.pipeline.simulation.asynchrony import depth_plan
from headrace.pipeline.simulation.baselines import (
    InOrder,
    batch_rounds,
    list_schedule,
    lockstep,
    one_after_the_other,
    one_engine_per_prompt,
    rows_seconds,
)
from headrace.pipeline.simulation.draws import Draws, GroupDraw
from headrace.pipeline.simulation.plan import Plan
from headrace.pipeline.simulation.world import simulate


def group(tokens: list[float], environment: list[list[float]] | None = None) -> GroupDraw:
    count = len(tokens)
    return GroupDraw(
        tokens=np.array(tokens)[:, None], environment=np.array(environment or [[0.0]] * count),
        hangs_in=np.full(count, -1), reward=np.zeros(count), passes=True,
    )  # fmt: skip


def test_lockstep_waits_for_the_slowest_of_every_turn() -> None:
    groups = [group([1, 1], [[1.0, 9.0], [4.0, 2.0]]), group([1], [[3.0, 5.0]])]
    assert lockstep(groups) == pytest.approx(4 + 9)


def test_rows_leave_an_engine_one_after_the_other() -> None:
    assert rows_seconds(np.array([3.0]), 1.0, 0.5) == pytest.approx(4.5)
    assert rows_seconds(np.array([5.0, 1.0, 1.0]), 1.0, 0.5) == pytest.approx(1 * 2.5 + 4 * 1.5)


def test_prompts_are_dealt_out_in_turn_and_the_slowest_engine_counts() -> None:
    plan = Plan().with_(machines={"engines": 2, "step_seconds": 1.0, "row_seconds": 0.0})
    assert one_engine_per_prompt(plan, [group([1, 2]), group([7, 1]), group([3, 3])]) == pytest.approx(7.0)


def test_rounds_are_drawn_until_enough_groups_pass() -> None:
    everything = Plan().with_(work={"batch_groups": 4, "group_size": 2}, machines={"step_seconds": 1.0})
    draws = Draws(everything)
    longest = [max(draws.group(g).lengths().max() for g in range(b, b + 4)) for b in (0, 4)]
    assert batch_rounds(everything, draws, 2) == pytest.approx(sum(longest) / 2)
    half = everything.with_(work={"pass_rate": 0.5})
    assert batch_rounds(half, Draws(half), 20) > 1.5 * batch_rounds(everything, draws, 20)


def test_list_scheduling_takes_the_first_free_machine() -> None:
    assert list_schedule(np.array([4.0, 1.0, 1.0, 1.0]), 2) == pytest.approx(4.0)


def test_in_order_without_running_ahead_is_one_after_the_other() -> None:
    rule = InOrder(np.array([3.0, 1.0, 2.0, 2.0]), batch=2, machines=2, alpha=0, train_seconds=10.0)
    assert rule.step_seconds(2, 0) == pytest.approx((3 + 10 + 2 + 10) / 2)


def test_in_order_a_straggler_holds_the_step_that_it_belongs_to() -> None:
    """One batch ahead: the second batch starts with the first, its straggler of 50 ends at 50."""
    rule = InOrder(np.array([1.0, 1.0, 50.0, 1.0, 1.0, 1.0]), batch=2, machines=4, alpha=1, train_seconds=5.0)
    assert rule.step_seconds(2, 0) == pytest.approx(55 / 2)
    assert rule.step_seconds(3, 0) == pytest.approx(60 / 3)


def test_one_after_the_other_is_what_the_product_does_at_depth_0() -> None:
    plan = depth_plan(0, -1, 3, samples=32, slots=8).with_(steps=6, warm_up=0)
    product = simulate(plan).step_seconds
    draws, train = Draws(plan), plan.machines.train_seconds
    batches = [np.array([draws.group(32 * b + i).tokens[0, 0] for i in range(32)]) for b in range(6)]
    assert product == pytest.approx(train + np.mean([list_schedule(batch, 8) for batch in batches]), rel=0.01)
    assert one_after_the_other(plan, 60) == pytest.approx(product, rel=0.3)
