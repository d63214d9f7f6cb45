"""What holds for every advantage: shifts, scales, orders and the mean over the members that count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.connectors.plugins import installed, load
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.advantages.advantage import Advantage, GroupRewards
from headrace.trainers.losses.loss import configured

NAMES = sorted(installed("headrace.advantages"))
REWARDS = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=9)


def made(name: str, **options: Any) -> Advantage:
    advantage: Advantage = configured(load("headrace.advantages", name), options, "trainer.advantage_options")
    return advantage


def group(rewards: list[float], trained: list[int] | None = None) -> GroupRewards:
    """The group of all these rewards, of which the members ``trained`` are trained."""
    chosen = range(len(rewards)) if trained is None else trained
    std = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
    return GroupRewards(
        rewards=[rewards[at] for at in chosen], mean=float(np.mean(rewards)), std=std, count=len(rewards)
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(rewards=REWARDS)
def test_values_sum_to_nothing_and_follow_the_order_of_rewards(name: str, rewards: list[float]) -> None:
    values = made(name)(group(rewards))
    assert sum(values) == pytest.approx(0.0, abs=1e-6 * (1 + max(map(abs, values))))
    order = np.argsort(rewards, kind="stable")
    assert np.all(np.diff(np.array(values)[order]) >= -1e-9)
    assert np.isfinite(values).all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(rewards=REWARDS, shift=st.floats(-3, 3, width=32))
def test_a_constant_added_to_every_reward_changes_nothing(name: str, rewards: list[float], shift: float) -> None:
    if np.std(rewards) < 1e-3:
        return
    advantage = made(name)
    moved = advantage(group([r + shift for r in rewards]))
    assert moved == pytest.approx(advantage(group(rewards)), abs=1e-3)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(rewards=REWARDS, data=st.data())
def test_a_members_value_is_the_same_whoever_else_is_trained(name: str, rewards: list[float], data: Any) -> None:
    trained = data.draw(st.lists(st.integers(0, len(rewards) - 1), unique=True))
    advantage = made(name)
    whole = advantage(group(rewards))
    assert advantage(group(rewards, trained)) == [whole[at] for at in trained]


def test_scale_is_kept_but_by_the_normalised_one() -> None:
    small, large = [0.0, 1.0, 1.0, 0.0], [0.0, 10.0, 10.0, 0.0]
    for name in NAMES:
        one, ten = made(name)(group(small)), made(name)(group(large))
        factor = 1.0 if name == "group" else 10.0
        assert ten == pytest.approx([factor * value for value in one], rel=1e-4), name


def test_leave_one_out_is_the_distance_to_the_mean_of_the_others() -> None:
    rewards = [0.5, -1.0, 2.0, 2.0, 0.0]
    values = made("rloo")(group(rewards))
    for at, reward in enumerate(rewards):
        others = rewards[:at] + rewards[at + 1 :]
        assert values[at] == pytest.approx(reward - np.mean(others))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("singleton", "value"), [("zero", 0.0), ("raw", 0.7)])
def test_the_only_member_gets_nothing_or_its_reward(name: str, singleton: str, value: float) -> None:
    assert made(name, singleton=singleton)(group([0.7])) == [value]
    assert made(name, singleton=singleton)(group([0.7], [])) == []


@pytest.mark.parametrize("name", NAMES)
def test_unknown_options_are_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.advantage_options\.epsilonn"):
        made(name, epsilonn=1)
