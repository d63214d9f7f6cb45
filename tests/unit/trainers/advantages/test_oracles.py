"""Advantages against values that another project's own functions gave, and their edges."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.trainers.advantages.advantage import AdvantageOptions, GroupRewards
from headrace.trainers.advantages.dr import GroupCentered
from headrace.trainers.advantages.group import GroupNormalized, GroupNormalizedOptions
from headrace.trainers.advantages.rloo import LeaveOneOut

FOLDER = Path(__file__).parents[3] / "oracles"


def group_of(rewards: list[float]) -> GroupRewards:
    std = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
    return GroupRewards(rewards=rewards, mean=float(np.mean(rewards)), std=std, count=len(rewards))


def cases(name: str, make: Any) -> list[Any]:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    return [
        pytest.param(make, case, data["inputs"][case["inputs"]], id=f"{name}-{case['function']}-{case['case']}")
        for case in data["cases"]
    ]


@pytest.mark.parametrize(
    ("make", "case", "inputs"),
    cases("adv_grpo", lambda singleton: GroupNormalized(GroupNormalizedOptions(singleton=singleton)))
    + cases("adv_dr_grpo", lambda singleton: GroupCentered(AdvantageOptions(singleton=singleton)))
    + cases("adv_rloo", lambda singleton: LeaveOneOut(AdvantageOptions(singleton=singleton))),
)
def test_advantages_agree_with_the_oracles(make: Any, case: dict[str, Any], inputs: dict[str, Any]) -> None:
    advantage = make("zero" if "vectorized" in case["function"] else "raw")
    groups: dict[int, list[int]] = defaultdict(list)
    for at, group in enumerate(inputs["group_ids"]):
        groups[group].append(at)
    wanted = np.array(case["outputs"]["advantages"])
    for members in groups.values():
        values = advantage(group_of([inputs["rewards"][at] for at in members]))
        for at, value in zip(members, values, strict=True):
            tokens = np.array(inputs["mask"][at])
            assert np.allclose(value * tokens, wanted[at], rtol=1e-5, atol=1e-6)


def test_singletons_are_zero_by_default() -> None:
    for advantage in (GroupNormalized(GroupNormalizedOptions()), GroupCentered(AdvantageOptions())):
        assert advantage(group_of([0.7])) == [0.0]


def test_statistics_come_from_the_group_not_from_its_trained_members() -> None:
    group = GroupRewards(rewards=[1.0], mean=0.25, std=0.5, count=4)
    assert GroupNormalized(GroupNormalizedOptions(epsilon=0.0))(group) == [1.5]
    assert LeaveOneOut(AdvantageOptions())(group) == [1.0]


def test_equal_rewards_give_zero() -> None:
    assert GroupNormalized(GroupNormalizedOptions())(group_of([0.1, 0.1, 0.1])) == pytest.approx(
        [0.0, 0.0, 0.0], abs=1e-9
    )
