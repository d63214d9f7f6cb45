"""``staleness``: the bound is met exactly, also by version 0, and what it costs is told."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from serving_feed import ServingFeed, make_candidate, make_moment

from headrace.pipeline.operators.staleness import Staleness, StalenessConfiguration
from headrace.schemas.config import PolicyConfig


def rule(**settings: Any) -> Staleness:
    return Staleness(StalenessConfiguration.model_validate(settings))


@pytest.mark.parametrize(("oldest", "served"), [(0, False), (2, False), (3, True), (7, True)])
def test_equality_with_the_bound_is_served_and_version_0_is_a_version(oldest: int, served: bool) -> None:
    refusal = rule().refusal(make_candidate(1, oldest_version=oldest), make_moment(start=7, bound=4))
    assert (refusal == "") == served
    if oldest == 0:
        assert refusal == "too_old: sampled by version 0, 7 before 7; the bound is 4"


def test_what_is_set_goes_over_the_policys_own() -> None:
    section = PolicyConfig(model="none", max_staleness=3)
    assert rule().policy("main", section) == section
    assert rule(max_staleness=5, mode="drop").policy("main", section) == section.model_copy(
        update={"max_staleness": 5, "mode": "drop"}
    )
    for settings in ({"max_staleness": -1}, {"mode": "hope"}, {"bound": 2}):
        with pytest.raises(ValidationError):
            StalenessConfiguration.model_validate(settings)


def test_a_dropped_group_says_what_it_had_earned_and_an_unfinished_one_that_it_had_not_finished() -> None:
    feed = ServingFeed({"type": "staleness"}, depth=1, max_staleness=1, mode="drop")
    feed.open(range(6))
    for group in (2, 3):
        feed.keep(group)
    feed.keep(4, raw_mean=0.25, raw_std=0.5, tokens=70)
    feed.keep(1, tokens=10)
    feed.step()
    closed = {r.group: r for r in feed.closed()}
    assert feed.fresh() == [[2, 3], [1, 4]]
    assert sorted(closed) == [0, 5]
    assert closed[0].operator == "staleness" and closed[0].detail == "unfinished: its last chance was batch 2"
    assert closed[0].tokens == 0 and closed[0].prompt_id == ""


def test_the_bias_of_dropping_is_in_the_records_and_the_metrics() -> None:
    feed = ServingFeed(depth=1, max_staleness=1, mode="drop", ahead=0)
    feed.open(range(5))
    for group in (0, 1, 2, 3):
        feed.keep(group)
    feed.keep(4, raw_mean=0.25, raw_std=0.5, tokens=70)
    feed.step()
    assert feed.closed() == []
    feed.step()
    (lost,) = feed.closed()
    assert (lost.group, lost.reason, lost.operator, lost.raw_mean, lost.tokens) == (4, "stale", "", 0.25, 70)
    assert lost.detail == "too_old: sampled by version 0, 2 before 2; the bound is 1"
    assert lost.prompt_id == "main-4" and lost.raw_std == 0.5
    metrics = feed.driver.metrics
    assert (metrics.total("stale_tokens"), metrics.total("stale_reward")) == (70, 0.25)
