"""The subset has the largest variance of all, is the same every time, and the rest keeps or leaves the statistics."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_feed import OperatorFeed, make_draft, statuses
from pydantic import ValidationError
from stage_feed import make_admission, make_config, make_driver, make_trajectory

from headrace.pipeline.operators.downsample import Downsample, DownsampleConfiguration, most_varied
from headrace.pipeline.operators.operator import mean_and_deviation
from headrace.schemas.records import Group, Kept, Member


def variance(values: list[float]) -> Fraction:
    exact = [Fraction(v) for v in values]
    mean = sum(exact) / len(exact)
    return Fraction(sum((v - mean) ** 2 for v in exact))


@given(st.lists(st.floats(-1e3, 1e3) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=9), st.integers(2, 9))
def test_no_other_subset_of_that_size_varies_more(rewards: list[float], keep: int) -> None:
    chosen = most_varied(rewards, keep)
    assert len(set(chosen)) == len(chosen) == min(keep, len(rewards)) and chosen == sorted(chosen)
    best = max(variance([rewards[i] for i in subset]) for subset in combinations(range(len(rewards)), len(chosen)))
    assert variance([rewards[i] for i in chosen]) == best


def applied(draft: Any, **options: Any) -> Any:
    return OperatorFeed().decide(Downsample(DownsampleConfiguration(**options)), draft)


def test_the_rest_stays_in_the_statistics() -> None:
    draft = make_draft([0, 0, 0, 0, 0, 1])
    result = applied(draft, keep=2)
    assert statuses(result) == "tbbbbt"
    assert (result.group.reward_mean, result.group.counted, result.group.trained) == (draft.group.reward_mean, 6, 2)


def test_renormalised_statistics_are_of_the_chosen_and_raw_ones_of_all() -> None:
    draft = make_draft([0, 0, 0, 0, 0, 1])
    result = applied(draft, keep=2, rest="renormalise")
    assert statuses(result) == "teeeet"
    assert (result.group.reward_mean, result.group.reward_std) == mean_and_deviation([0.0, 1.0])
    assert (result.group.raw_mean, result.group.raw_std) == (draft.group.raw_mean, draft.group.raw_std)
    assert (result.group.short, result.group.counted, result.group.trained) == (False, 2, 2)


def test_only_members_to_train_are_chosen_from_and_small_groups_pass() -> None:
    draft = make_draft([9.0, 0.0, 0.5, 1.0, -9.0], status=["baseline_only", "train", "train", "train", "excluded"])
    assert statuses(applied(draft, keep=2)) == "btbte"
    assert statuses(applied(draft, keep=2, rest="renormalise")) == "btete"
    assert applied(draft, keep=3) is draft


@pytest.mark.parametrize("options", [{}, {"keep": 1}, {"keep": 4, "rest": "drop"}])
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DownsampleConfiguration(**options)


@pytest.mark.parametrize(("rest", "mean"), [("baseline_only", 0.25), ("renormalise", 0.5)])
def test_the_stage_writes_every_member_and_the_statistics_that_advantages_take(rest: str, mean: float) -> None:
    config = make_config(operators=[{"type": "downsample", "keep": 2, "rest": rest}], group_size=4)
    driver = make_driver(config, "assemble")
    driver.append("admissions", make_admission(0, group_size=4))
    for replica, reward in enumerate([0.0, 0.0, 1.0, 0.0]):
        driver.append("trajectories", make_trajectory(0, replica, reward))
    driver.settle()
    *members, group = driver.records("groups")
    left_out = "baseline_only" if rest == "baseline_only" else "excluded"
    assert [m.status for m in members if isinstance(m, Member)] == ["train", left_out, "train", left_out]
    assert isinstance(group, Group) and (group.reward_mean, group.raw_mean, group.trained) == (mean, 0.25, 2)
    (kept,) = driver.records("ledger")
    assert isinstance(kept, Kept) and kept.complete and kept.raw_mean == 0.25
