"""``replay``: which groups the selectors choose, how many over a run, and that the bound holds for them too."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from serving_feed import ServingFeed, make_candidate, make_moment

from headrace.pipeline.operators.replay import Replay, ReplayConfiguration
from headrace.schemas.config import PolicyConfig

POOL = [
    make_candidate(4, entered=1, last_used=9, uses=3, reward_std=0.1),
    make_candidate(7, entered=2, last_used=4, uses=1, reward_std=0.5),
    make_candidate(5, entered=3, last_used=6, uses=2, reward_std=0.5),
    make_candidate(9, entered=4, last_used=5, uses=1, reward_std=0.0),
]


def replay(**settings: Any) -> Replay:
    return Replay(ReplayConfiguration.model_validate(settings))


@pytest.mark.parametrize(
    ("selector", "one", "two"),
    [("latest", [9], [5, 9]), ("oldest", [7], [7, 9]), ("reward_variance", [5], [7, 5])],
)
def test_a_selector_chooses_and_the_order_of_entry_stays(selector: str, one: list[int], two: list[int]) -> None:
    chosen = replay(selector=selector)
    assert list(chosen.choose(POOL, 1, make_moment())) == one
    assert list(chosen.choose(POOL, 2, make_moment())) == two
    assert list(chosen.choose(POOL, 9, make_moment())) == [4, 7, 5, 9], "fewer where the pool is short"
    assert list(chosen.choose(POOL[::-1], 2, make_moment())) == two, "whatever the order of the pool"


def test_uniform_draws_without_replacement_by_seed_and_batch() -> None:
    drawn = Counter(
        group for batch in range(4000) for group in replay(selector="uniform").choose(POOL, 2, make_moment(batch))
    )
    assert sum(drawn.values()) == 8000
    assert all(abs(n - 2000) < 150 for n in drawn.values()), drawn
    once = [list(replay(selector="uniform").choose(POOL, 2, make_moment(b))) for b in range(40)]
    assert once == [list(replay(selector="uniform").choose(POOL[::-1], 2, make_moment(b))) for b in range(40)]
    other = [list(replay(selector="uniform").choose(POOL, 2, make_moment(b, seed=1))) for b in range(40)]
    assert once != other


def test_max_uses_counts_replayed_uses() -> None:
    assert list(replay(max_uses=1, selector="latest").choose(POOL, 4, make_moment())) == [7, 9]
    assert list(replay(max_uses=2, selector="latest").choose(POOL, 4, make_moment())) == [7, 5, 9]
    assert (replay().capacity(3), replay(pool=5).capacity(3)) == (12, 5)


@pytest.mark.parametrize("ratio", [1.0, 1.5, float("nan"), float("inf"), -0.1])
def test_a_ratio_that_leaves_nothing_fresh_is_refused(ratio: float) -> None:
    with pytest.raises(ValidationError, match=r"ratio is below 1|greater than or equal to 0|finite"):
        ReplayConfiguration(ratio=ratio)


def test_the_ratio_is_the_policys_share_and_leaves_it_where_it_is_unset() -> None:
    section = PolicyConfig(model="none", replay=0.3)
    assert replay(ratio=0.5).policy("main", section).replay == 0.5
    assert replay(ratio=0).policy("main", section).replay == 0
    assert replay(selector="latest").policy("main", section) == section


def play(batches: int, *operators: dict[str, Any], size: int = 4, **policy: Any) -> ServingFeed:
    """So many batches, each of groups that its own version sampled."""
    feed = ServingFeed(*operators, size=size, depth=1, **{"max_staleness": 4, **policy})
    stage: Any = feed.driver.stage_of("batch")
    for batch in range(batches):
        groups = range(batch * stage.fresh, (batch + 1) * stage.fresh)
        feed.open(groups, batch)
        for group in groups:
            feed.keep(group, batch, settle=False)
        feed.driver.settle()
        feed.step()
    return feed


@settings(max_examples=12, deadline=None)
@given(size=st.integers(1, 10), share=st.sampled_from([0.29, 0.3, 0.5, 0.7, 0.9, 1 / 3]))
def test_the_share_is_exact_over_a_run_and_every_batch_is_fresh_in_part(size: int, share: float) -> None:
    batches = 14
    feed = play(batches, size=size, replay=share, max_staleness=30)
    fresh = max(1, round((1 - share) * size))
    assert [len(groups) for groups in feed.fresh()] == [fresh] * batches
    due = fresh * Fraction(repr(share)) / (1 - Fraction(repr(share)))
    made = [sum(map(len, feed.replayed()[: n + 1])) for n in range(batches)]
    assert all(n <= due * (at + 1) for at, n in enumerate(made)), "never more than the share"
    if due <= fresh:  # else so short a run has not made up yet what its first batches lacked
        assert made[-1] == int(due * batches), "exactly the share, but for the fraction of a group"
    model = 0
    for batch in range(1, batches + 1):
        pool, owed = min(fresh * (batch - 1), 4 * size), int(due * batch) - model
        model += max(0, min(owed, math.ceil(due) + 1, pool))
    assert made[-1] == model, "all that the pool could give"
    for now, used in enumerate(feed.replayed()):
        assert not set(used) & set(feed.fresh()[now]), "none in its own first batch again"


@pytest.mark.parametrize("selector", ["latest", "oldest", "uniform", "reward_variance"])
def test_no_replayed_token_is_older_than_the_bound_and_uses_are_numbered(selector: str) -> None:
    """AstraFlow has no bound here: it served samples of version 0 at version 50."""
    feed = play(12, {"type": "replay", "selector": selector}, replay=0.5, max_staleness=2)
    ages = [m.start_version - x.oldest_version for m in feed.manifests() for x in m.members if x.use]
    assert ages and max(ages) <= 2
    uses: Counter[tuple[int, int]] = Counter()
    for manifest in feed.manifests():
        for member in manifest.members:
            assert member.use == uses[member.group, member.replica]
            uses[member.group, member.replica] += 1
        assert manifest.replayed_groups == len({m.group for m in manifest.members if m.use})
    stage: Any = feed.driver.stage_of("batch")
    assert len(stage.held.pool) <= 3 * stage.fresh, "what no batch may take any more leaves the pool"


def test_latest_takes_up_the_end_of_the_batch_before_and_oldest_spreads_uses() -> None:
    latest = play(4, {"type": "replay", "selector": "latest"}, replay=0.5).replayed()
    assert latest == [[], [0, 1], [1, 2, 3], [3, 4, 5]], "one more a batch until the first batch's lack is made up"
    oldest = play(4, {"type": "replay", "selector": "oldest"}, replay=0.5).replayed()
    assert oldest == [[], [0, 1], [0, 2, 3], [1, 4, 5]]


def test_a_small_pool_loses_what_entered_first() -> None:
    feed = play(4, {"type": "replay", "selector": "oldest", "pool": 3}, replay=0.5)
    assert [set(used) <= set(range(2 * n - 3, 2 * n)) for n, used in enumerate(feed.replayed())] == [True] * 4
    assert feed.driver.metrics.gauges["batch_pool", (("policy", "main"),)] == 3
