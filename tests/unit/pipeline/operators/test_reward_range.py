"""The bounds are included, the mean is over counted members, and what is dropped says its numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_feed import OperatorFeed, make_draft
from pydantic import ValidationError

from headrace.pipeline.operators.operator import GroupDraft
from headrace.pipeline.operators.reward_range import RewardRange, RewardRangeConfiguration


def applied(draft: GroupDraft, **options: Any) -> Any:
    ended = OperatorFeed().decide(RewardRange(RewardRangeConfiguration(**options)), draft)
    return "kept" if ended is draft else ended


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0, 0, 0, 0, 1], "kept"),
        ([0, 1, 1, 1, 1], "kept"),
        ([0, 0, 0, 0, 0, 1], ("reward_too_low", "mean raw reward of 6 members is 0.166667, below 0.2")),
        ([1, 1], ("reward_too_high", "mean raw reward of 2 members is 1, above 0.8")),
        ([0.5, 0.6, float("nan")], ("reward_unknown", "raw rewards of 3 members are 0.5, 0.6, nan")),
    ],
)
def test_range(rewards: list[float], expected: Any) -> None:
    assert applied(make_draft(rewards), low=0.2, high=0.8) == expected


def test_one_bound_is_enough() -> None:
    assert applied(make_draft([1, 1]), low=0.2) == "kept"
    assert applied(make_draft([0, 0]), high=0.8) == "kept"


def test_raw_and_shaped_rewards_are_told_apart_and_excluded_members_left_out() -> None:
    draft = make_draft([1.0, 0.0, 0.0], status=["train", "baseline_only", "excluded"])
    shaped = draft.with_members([replace(m, shaped_reward=m.raw_reward - 1) for m in draft.members])
    assert applied(shaped, low=0.5) == "kept"
    told = ("reward_too_low", "mean shaped reward of 2 members is -0.5, below 0.5")
    assert applied(shaped, low=0.5, reward="shaped") == told
    assert applied(make_draft([1.0], status=["excluded"]), low=0)[0] == "reward_unknown"


@pytest.mark.parametrize("options", [{}, {"low": 0.8, "high": 0.2}, {"low": float("nan")}, {"high": float("inf")}])
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RewardRangeConfiguration(**options)
