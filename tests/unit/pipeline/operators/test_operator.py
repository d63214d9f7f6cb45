"""Statistics of a draft follow its members."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_feed import make_members

from headrace.pipeline.operators.operator import GroupDraft, mean_and_deviation
from headrace.schemas.records import Group, Member


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_mean_and_deviation_are_the_unbiased_ones(values: list[float]) -> None:
    mean, deviation = mean_and_deviation(values)
    assert mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6)
    assert deviation == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_finite_values_have_a_finite_mean_among_them_and_a_finite_deviation(values: list[float]) -> None:
    mean, deviation = mean_and_deviation(values)
    room = 1e-9 * max(map(abs, values))
    assert min(values) - room <= mean <= max(values) + room
    assert 0 <= deviation < float("inf")


@given(st.floats(-1e6, 1e6), st.integers(1, 20))
def test_equal_values_have_no_deviation_at_all(value: float, count: int) -> None:
    assert mean_and_deviation([value] * count) == (value, 0.0)


def test_with_members_takes_the_statistics_again() -> None:
    *members, group = make_members(0, oldest=3, tokens=(2, 3, 4))
    first, second, third = (cast(Member, m) for m in members)
    draft = GroupDraft(group=cast(Group, group), members=(), group_size=4)
    shaped = replace(first, shaped_reward=4.0)
    changed = draft.with_members([shaped, replace(second, status="baseline_only"), replace(third, status="excluded")])
    g = changed.group
    assert (g.members, g.counted, g.trained, g.short) == (3, 2, 1, True)
    assert (g.reward_mean, g.raw_mean, g.tokens) == (2.5, 0.5, 2)
    assert (g.oldest_version, g.newest_version) == (3, 3)
    nothing = draft.with_members([])
    assert (nothing.group.oldest_version, nothing.group.reward_std) == (-1, 0.0)
