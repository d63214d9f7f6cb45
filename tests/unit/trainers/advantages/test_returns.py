"""Rewards on tokens, turns, roles and several sequences of a trajectory; penalties; the estimators made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.trainers.advantages.advantage import BatchAdvantage, Needs, Scored
from headrace.trainers.advantages.gae import GAE, GAEOptions
from headrace.trainers.advantages.reinforce_pp import ReinforcePP
from headrace.trainers.advantages.reinforce_pp_baseline import ReinforcePPBaseline, ReinforcePPBaselineOptions
from headrace.trainers.advantages.returns import ReturnsOptions

PLAIN: dict[str, Any] = {"whiten": False}


def member(*masks: list[int], reward: float = 1.0, **more: Any) -> Scored:
    given: dict[str, Any] = {
        "group": (0, 0), "reward": reward, "mean": 0.25, "std": 0.5, "count": 4, "roles": ["policy"] * len(masks),
        "masks": [np.array(mask, bool) for mask in masks],
    }  # fmt: skip
    return Scored(**{**given, **more})


def tokens(advantage: BatchAdvantage, one: Scored) -> list[list[float]]:
    """Advantages of the trained tokens of each sequence; everything else must be 0."""
    (found,) = advantage.of_batch([one], dict)
    for values, mask in zip(found.advantages, one.masks, strict=True):
        assert len(values) == len(mask) and not values[~mask].any()
    return [values[mask].round(9).tolist() for values, mask in zip(found.advantages, one.masks, strict=True)]


def test_a_reward_reaches_every_turn_before_it_across_observations() -> None:
    """Not reset at an observation: an earlier turn shares in what it led to."""
    found = tokens(ReinforcePP(ReturnsOptions(gamma=0.5, **PLAIN)), member([0, 1, 1, 0, 0, 1, 1]))
    assert found == [[0.125, 0.25, 0.5, 1.0]]


def test_sequences_of_a_trajectory_follow_one_another() -> None:
    found = tokens(ReinforcePP(ReturnsOptions(gamma=0.5, **PLAIN)), member([0, 1, 1], [0, 0, 1], [0, 0, 0]))
    assert found == [[0.25, 0.5], [1.0], []]


def test_roles_are_chains_of_their_own() -> None:
    both = member([0, 1], [0, 1], [0, 1], roles=["solver", "critic", "solver"])
    assert tokens(ReinforcePP(ReturnsOptions(gamma=0.5, **PLAIN)), both) == [[0.5], [1.0], [1.0]]


def test_parts_of_the_reward_can_go_to_their_turns() -> None:
    one = member([0, 1, 1, 0, 1], [0, 1], reward=1.0, turn_rewards={0: 0.5, 1: -0.25, 7: 3.0})
    found = tokens(ReinforcePP(ReturnsOptions(gamma=1.0, turn_rewards=True, **PLAIN)), one)
    assert found == [[1.0, 1.0, 0.5], [0.75]], "a turn that does not exist leaves its part with the rest"
    assert tokens(ReinforcePP(ReturnsOptions(**PLAIN)), one) == [[1.0, 1.0, 1.0], [1.0]]


def test_the_reward_may_be_taken_relative_to_the_group() -> None:
    one, lonely = member([0, 1]), member([0, 1], count=1)
    for reward, value in (("shaped", 1.0), ("centered", 0.75), ("normalized", 1.5)):
        options = ReinforcePPBaselineOptions(reward=reward, reward_epsilon=0.0, **PLAIN)  # type: ignore[arg-type]
        assert tokens(ReinforcePPBaseline(options), one) == [[value]]
        assert tokens(ReinforcePPBaseline(options), lonely) == [[1.0 if reward == "shaped" else 0.0]]
    flat = member([0, 1], std=0.0)
    assert tokens(ReinforcePPBaseline(ReinforcePPBaselineOptions(reward="normalized", **PLAIN)), flat) == [[0.0]]


def test_tokens_pay_for_their_distance_to_the_reference() -> None:
    advantage = ReinforcePP(ReturnsOptions(kl_weight=0.1, kl="k3", **PLAIN))
    assert advantage.needs == Needs(kl="k3") and ReinforcePP(ReturnsOptions()).needs == Needs()
    one = member([0, 1, 0, 1], kl=[np.array([9.0, 1.0, 9.0, 2.0])])
    assert tokens(advantage, one) == [[0.7, 0.8]]


def test_gae_gives_a_critic_its_returns() -> None:
    advantage = GAE(GAEOptions(gamma=0.9, lam=0.5, **PLAIN))
    assert advantage.needs == Needs(values=True)
    one = member([0, 1, 0, 1], values=[np.array([7.0, 0.2, 7.0, 0.6])])
    (found,) = advantage.of_batch([one], dict)
    last = 1.0 - 0.6
    first = 0.9 * 0.6 - 0.2 + 0.9 * 0.5 * last
    assert found.advantages[0].tolist() == pytest.approx([0, first, 0, last])
    assert found.returns[0].tolist() == pytest.approx([0, first + 0.2, 0, 1.0])


def test_whitening_is_over_the_tokens_of_all_trajectories_and_leaves_returns_alone() -> None:
    advantage = GAE(GAEOptions(lam=1.0))
    zeros = [np.zeros(4)]
    pair = [member([0, 1, 1, 1], reward=1.0, values=zeros), member([0, 0, 0, 1], reward=0.0, values=zeros)]
    found = advantage.of_batch(pair, dict)
    flat = np.concatenate([part.advantages[0][m.masks[0]] for part, m in zip(found, pair, strict=True)])
    assert flat.mean() == pytest.approx(0) and flat.std(ddof=1) == pytest.approx(1)
    assert found[0].returns[0].tolist() == [0, 1, 1, 1]


def test_an_empty_trajectory_and_an_empty_rank_are_fine() -> None:
    for advantage in (ReinforcePP(ReturnsOptions()), ReinforcePPBaseline(ReinforcePPBaselineOptions())):
        assert advantage.of_batch([], dict) == []
        (found,) = advantage.of_batch([member([0, 0])], dict)
        assert not found.advantages[0].any()
        (none,) = advantage.of_batch([member()], dict)
        assert none.advantages == []
