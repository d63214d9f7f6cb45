"""What holds for every advantage: shifts, scales, orders and the mean over the members that count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.connectors.plugins import installed, load
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.advantages.advantage import Advantage, GroupRewards, Scored
from headrace.trainers.losses.loss import configured

EVERY = sorted(installed("headrace.advantages"))
OF_BATCH = [name for name in EVERY if hasattr(load("headrace.advantages", name), "of_batch")]
NAMES = ["dr", "group", "rloo"]
"""Of a group, centred on its mean, and linear in its rewards but for a scale."""
OF_GROUP = [name for name in EVERY if name not in OF_BATCH and name != "remax"]
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


@pytest.mark.parametrize("name", [name for name in OF_GROUP if name != "pass_at_k"])
@pytest.mark.parametrize(("singleton", "value"), [("zero", 0.0), ("raw", 0.7)])
def test_the_only_member_gets_nothing_or_its_reward(name: str, singleton: str, value: float) -> None:
    assert made(name, singleton=singleton)(group([0.7])) == [value]
    assert made(name, singleton=singleton)(group([0.7], [])) == []


@pytest.mark.parametrize("name", OF_GROUP)
@settings(max_examples=30, deadline=None)
@given(rewards=REWARDS)
def test_the_best_never_gets_less_than_the_worst(name: str, rewards: list[float]) -> None:
    values = made(name)(group([abs(r) for r in rewards]))
    assert np.isfinite(values).all()
    best, worst = (int(f([abs(r) for r in rewards])) for f in (np.argmax, np.argmin))
    assert values[best] >= values[worst] - 1e-9


@pytest.mark.parametrize("name", OF_GROUP)
def test_equal_rewards_of_a_group_teach_nothing(name: str) -> None:
    assert made(name)(group([0.4, 0.4, 0.4, 0.4])) == pytest.approx([0.0] * 4, abs=1e-9)


@pytest.mark.parametrize("name", [name for name in OF_BATCH if name != "gae"])
def test_equal_rewards_of_a_batch_teach_nothing(name: str) -> None:
    """GAE is left out: what it teaches then is the critic's error."""
    advantage: Any = made(name)
    members = [scored(0.4, group([0.4] * 4), at) for at in range(4)]
    assert not any(a.any() for part in advantage.of_batch(members, dict) for a in part.advantages)


def scored(reward: float, whole: GroupRewards, at: int) -> Scored:
    return Scored(
        group=(0, 0), reward=reward, mean=whole.mean, std=whole.std, count=whole.count,
        masks=[np.array([False] + [True] * (1 + at))], roles=["policy"],
    )  # fmt: skip


def test_max_rl_weighs_hard_prompts_more() -> None:
    hard, easy = made("maxrl")(group([1.0, 0.0, 0.0, 0.0])), made("maxrl")(group([1.0, 1.0, 1.0, 0.0]))
    assert hard == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert easy[0] == pytest.approx(1 / 3)
    assert made("maxrl")(group([-1.0, 0.5, -2.0])) == [0.0, 0.0, 0.0], "no mean to divide by"


def test_pass_at_k_teaches_only_a_leader() -> None:
    assert made("pass_at_k", normalize=False)(group([0.2, 1.0, 0.7])) == pytest.approx([0.0, 0.3, 0.0])
    assert made("pass_at_k")(group([1.0, 1.0, 0.0])) == [0.0, 0.0, 0.0]
    assert made("pass_at_k")(group([1.0])) == [0.0]


def test_opo_weighs_rewards_by_length() -> None:
    given = group([1.0, 0.0])
    weighed = GroupRewards(rewards=given.rewards, mean=given.mean, std=given.std, count=2, lengths=[3, 1])
    assert made("opo")(weighed) == pytest.approx([0.25, -0.75])
    assert made("opo")(given) == pytest.approx([0.5, -0.5])
    empty = GroupRewards(rewards=[1.0, 0.0], mean=0.5, std=0.7, count=2, lengths=[0, 0])
    assert made("opo")(empty) == [0.0, 0.0]


def test_remax_names_the_part_that_is_missing() -> None:
    given = group([1.0, 0.0])
    whole = GroupRewards(rewards=given.rewards, mean=0.5, std=0.7, count=2, parts=[{"greedy": 0.25}, {"greedy": 0.25}])
    assert made("remax")(whole) == [0.75, -0.25]
    with pytest.raises(ConfigurationError, match="'greedy'"):
        made("remax")(given)
    with pytest.raises(ConfigurationError, match="'best'"):
        made("remax", baseline="best")(whole)


@pytest.mark.parametrize("name", EVERY)
def test_unknown_options_are_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.advantage_options\.epsilonn"):
        made(name, epsilonn=1)
