"""Zero variance is exact, named, and says its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from stage_feed import make_members

from headrace.pipeline.operators.dynamic_sampling import DynamicSampling, DynamicSamplingConfiguration
from headrace.pipeline.operators.operator import GroupDraft
from headrace.schemas.parts import Reward


class Ending:
    """Remembers how a group ended."""

    metrics: Any = None
    ended: Any = None

    def now(self) -> int:
        return 0

    def store(self) -> Any:
        raise AssertionError("there is no state")

    def schedule(self, key: str, at_ms: int) -> None:
        raise AssertionError("there are no timers")

    def emit(self, draft: GroupDraft) -> None:
        self.ended = draft

    def drop(self, reason: str, detail: str) -> None:
        self.ended = (reason, detail)


def applied(rewards: list[float], tolerance: float = 0.0, statuses: list[str] | None = None) -> Any:
    *members, group = make_members(0, tokens=[1] * len(rewards))
    for number, reward in enumerate(rewards):
        object.__setattr__(members[number], "shaped_reward", reward)
        if statuses:
            object.__setattr__(members[number], "status", statuses[number])
    draft: Any = GroupDraft(group=group, members=tuple(members), group_size=len(rewards))  # type: ignore[arg-type]
    ending = Ending()
    DynamicSampling(DynamicSamplingConfiguration(tolerance=tolerance)).process(draft, ending)
    return "kept" if ending.ended is draft else ending.ended


@pytest.mark.parametrize(
    ("rewards", "tolerance", "expected"),
    [
        ([1.0, 0.0], 0.0, "kept"),
        ([0.1, 0.1 + 1e-18], 0.0, ("zero_variance", "all 2 rewards are 0.1")),
        ([0.3, 0.1 + 0.2], 0.0, "kept"),
        ([0.3, 0.1 + 0.2], 1e-9, ("zero_variance", "2 rewards lie within 0.3 and 0.3")),
        ([1.0] * 8, 0.0, ("zero_variance", "all 8 rewards are 1")),
        ([1.0], 0.0, ("zero_variance", "all 1 rewards are 1")),
        ([0.0, 0.5, 1.0], 1.0, ("zero_variance", "3 rewards lie within 0 and 1")),
    ],
)
def test_zero_variance(rewards: list[float], tolerance: float, expected: Any) -> None:
    assert applied(rewards, tolerance) == expected


def test_excluded_members_do_not_count_and_baselines_do() -> None:
    assert applied([1.0, 1.0, 0.0], statuses=["train", "train", "excluded"]) == (
        "zero_variance",
        "all 2 rewards are 1",
    )
    assert applied([1.0, 1.0, 0.0], statuses=["train", "train", "baseline_only"]) == "kept"


@pytest.mark.parametrize(
    ("roles", "kept"),
    [
        ([{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}], True),
        ([{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}], False),
        ([{"a": 1.0}, {"a": 1.0, "b": 0.0}], False),
        ([{"a": 1.0}, {"a": 0.0}], True),
        ([{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.0}], True),
    ],
)
def test_of_several_roles_one_that_varies_keeps_the_group(roles: list[dict[str, float]], kept: bool) -> None:
    """Two roles whose rewards add up to the same still teach each of them; one that is played once teaches nothing."""
    *members, group = make_members(0, tokens=[1] * len(roles))
    for member, earned in zip(members, roles, strict=True):
        parts = [Reward(name="mark", value=value, role=role) for role, value in earned.items()]
        mean = sum(earned.values()) / len(earned)
        for name, value in (("rewards", parts), ("raw_reward", mean), ("shaped_reward", mean)):
            object.__setattr__(member, name, value)
    draft: Any = GroupDraft(group=group, members=tuple(members), group_size=len(roles))  # type: ignore[arg-type]
    ending = Ending()
    DynamicSampling(DynamicSamplingConfiguration()).process(draft, ending)
    assert (ending.ended is draft) is kept


@pytest.mark.parametrize(
    ("rewards", "same"),
    [
        ([1.0, 1.000009], True),
        ([1.0, 1.00002], False),
        ([0.0, 1e-8], True),
        ([0.0, 2e-8], False),
        ([-1.0, -1.000009], True),
        ([1.0, 0.0, 0.0, 1.0], False),
        ([1.0], True),
        ([], True),
    ],
)
def test_allclose_is_measured_from_the_first_reward(rewards: list[float], same: bool) -> None:
    operator = DynamicSampling(DynamicSamplingConfiguration(test="allclose"))
    assert operator.varied(rewards) is not same
    if len(rewards) > 1:
        assert bool(np.allclose(rewards, rewards[0])) is same


def test_rewards_that_are_no_numbers_are_dropped_by_name_and_two_tests_at_once_refused() -> None:
    assert applied([1.0, float("nan")]) == ("reward_unknown", "rewards are 1, nan")
    with pytest.raises(ValidationError, match="allclose has its own"):
        DynamicSamplingConfiguration(test="allclose", tolerance=0.1)
