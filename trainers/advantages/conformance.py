"""What every advantage must keep, tried on groups of all sorts: a finite value for each member, whatever the order.

In: a name or ``module:Class`` with its options. Out: one ``Check`` for every promise of ``advantage.Advantage``, or of
``advantage.BatchAdvantage`` for one that looks at a whole batch; that is also split over two ranks.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np

from headrace.connectors.conformance import Check, attempt
from headrace.connectors.plugins import load
from headrace.trainers.advantages.advantage import (
    Advantage,
    BatchAdvantage,
    GroupRewards,
    Scored,
    TokenAdvantages,
)
from headrace.trainers.losses.loss import configured

__all__ = ("conformance",)

REWARDS = (
    (1.0, 0.0, 0.0, 1.0), (1.0, 1.0, 1.0), (0.0, 0.0), (0.3, -2.5, 0.7, 0.7, 1e6), (1.0,), (0.0, 1e-12), (-1.0, 1.0),
)  # fmt: skip
"""Rewards of groups: binary, equal, real, far apart, hardly apart, and one alone."""


def conformance(name: str, settings: Mapping[str, Any]) -> list[Check]:
    """Try an advantage. Raises ConfigurationError for an unknown name and options that it refuses."""
    made: Any = configured(load("headrace.advantages", name), settings, "trainer.advantage_options")
    if hasattr(made, "of_batch"):
        return _of_batches(cast(BatchAdvantage, made))
    return _of_groups(cast(Advantage, made))


# -------------------------------------------------------------------------------------------------------- by group


def _of_groups(advantage: Advantage) -> list[Check]:
    groups = [_group(rewards) for rewards in REWARDS]
    return [
        attempt("values", lambda: _values(advantage, groups)),
        attempt("order", lambda: _order(advantage, groups)),
        attempt("determinism", lambda: _again(advantage, groups)),
    ]


def _group(rewards: Sequence[float]) -> GroupRewards:
    """A group with two counted members that are not trained, of mean reward."""
    mean = float(np.mean(rewards))
    counted = [*rewards, mean, mean] if len(rewards) > 1 else list(rewards)
    deviation = float(np.std(counted, ddof=1)) if len(set(counted)) > 1 else 0.0
    return GroupRewards(
        rewards=list(rewards), mean=mean, std=deviation, count=len(counted),
        lengths=[3 + 2 * at for at in range(len(rewards))], parts=[{"reward": r} for r in rewards],
    )  # fmt: skip


def _values(advantage: Advantage, groups: Sequence[GroupRewards]) -> str:
    for group in groups:
        values = list(advantage(group))
        assert len(values) == len(group.rewards), f"it gives {len(values)} values for {len(group.rewards)} members"
        assert np.isfinite(values).all(), f"rewards {group.rewards} give {values}"
    return f"one finite value a member in {len(groups)} groups, one alone included"


def _order(advantage: Advantage, groups: Sequence[GroupRewards]) -> str:
    for group in groups:
        turned = GroupRewards(
            rewards=group.rewards[::-1], mean=group.mean, std=group.std, count=group.count,
            lengths=group.lengths[::-1], parts=group.parts[::-1],
        )  # fmt: skip
        same = np.allclose(advantage(turned)[::-1], advantage(group), rtol=1e-9, atol=1e-12)
        assert same, f"members of rewards {group.rewards} get other values in another order"
    return "members get the same values in any order"


def _again(advantage: Advantage, groups: Sequence[GroupRewards]) -> str:
    assert all(advantage(g) == advantage(g) for g in groups), "called again it gives other values"
    return "the same values when it is called again"


# -------------------------------------------------------------------------------------------------------- by batch


def _of_batches(advantage: BatchAdvantage) -> list[Check]:
    members = [m for number, rewards in enumerate(REWARDS) for m in _members(advantage, number, rewards)]
    return [
        attempt("values", lambda: _shapes(advantage, members)),
        attempt("ranks", lambda: _ranks(advantage, members)),
        attempt("determinism", lambda: _batch_again(advantage, members)),
    ]


def _members(advantage: BatchAdvantage, number: int, rewards: Sequence[float]) -> list[Scored]:
    """The trajectories of a group, one or two sequences each, with masks that have holes."""
    group, needs = _group(rewards), advantage.needs
    random = np.random.default_rng(number)
    out = []
    for at, reward in enumerate(rewards):
        masks = [random.random(4 + at + part) < 0.7 for part in range(1 + (at + number) % 2)]
        for mask in masks:
            mask[0], mask[1] = False, True
        turns = {0: 0.5 * reward} if number == 0 else {}
        out.append(
            Scored(
                group=(0, number),
                reward=reward,
                mean=group.mean,
                std=group.std,
                count=group.count,
                masks=masks,
                roles=["policy"] * len(masks),
                turn_rewards=turns,
                values=[random.normal(size=m.size) for m in masks] if needs.values else (),
                kl=[random.normal(size=m.size) for m in masks] if needs.kl is not None else (),
            )
        )
    return out


def _alone(sums: Mapping[str, float]) -> dict[str, float]:
    return dict(sums)


def _shapes(advantage: BatchAdvantage, members: Sequence[Scored]) -> str:
    found = advantage.of_batch(members, _alone)
    assert len(found) == len(members), f"it gives {len(found)} trajectories, not {len(members)}"
    for member, tokens in zip(members, found, strict=True):
        for part in (tokens.advantages, *([tokens.returns] if tokens.returns else [])):
            shapes = [values.shape for values in part]
            assert shapes == [m.shape for m in member.masks], f"values of shapes {shapes} for masks of other shapes"
            assert all(np.isfinite(values).all() for values in part), f"reward {member.reward:g} gives no finite values"
        outside = [v[~m].any() for v, m in zip(tokens.advantages, member.masks, strict=True)]
        assert not any(outside), "an advantage outside the mask is not 0"
    return f"finite values for each token of {len(members)} trajectories, 0 outside the mask"


def _ranks(advantage: BatchAdvantage, members: Sequence[Scored]) -> str:
    """Whole groups on two ranks that add up together give what one rank gives."""
    parts = [[m for m in members if m.group[1] % 2 == rank] for rank in (0, 1)]
    meeting, told = threading.Barrier(2, timeout=10), dict[int, Mapping[str, float]]()

    def adding(rank: int) -> Callable[[Mapping[str, float]], dict[str, float]]:
        def add_up(sums: Mapping[str, float]) -> dict[str, float]:
            told[rank] = dict(sums)
            meeting.wait()
            total = {key: told[0].get(key, 0.0) + told[1].get(key, 0.0) for key in {*told[0], *told[1]}}
            meeting.wait()
            return total

        return add_up

    def ranked(rank: int) -> list[TokenAdvantages]:
        done = False
        try:
            values = advantage.of_batch(parts[rank], adding(rank))
            done = True
        finally:
            if not done:  # else the other rank would wait for this one
                meeting.abort()
        return values

    with ThreadPoolExecutor(2) as pool:
        split = list(pool.map(ranked, (0, 1)))
    whole = advantage.of_batch(members, _alone)
    by_rank = [iter(found) for found in split]
    for member, one in zip(members, whole, strict=True):
        other = next(by_rank[member.group[1] % 2])
        same = all(np.allclose(a, b, rtol=1e-9, atol=1e-12)
                   for a, b in zip(one.advantages, other.advantages, strict=True))  # fmt: skip
        assert same, f"a trajectory of group {member.group[1]} gets other values when its batch is on two ranks"
    return "two ranks that add up together give what one gives"


def _batch_again(advantage: BatchAdvantage, members: Sequence[Scored]) -> str:
    one, other = advantage.of_batch(members, _alone), advantage.of_batch(members, _alone)
    for a, b in zip(one, other, strict=True):
        same = all(np.array_equal(x, y) for x, y in zip(a.advantages, b.advantages, strict=True))
        assert same, "called again it gives other values"
    return "the same values when it is called again"
