"""``edf``: the earliest last chance first, ties by admission."""

from __future__ import annotations

from serving_feed import ServingFeed, make_candidate, make_moment

from headrace.pipeline.operators.edf import EarliestDeadline
from headrace.pipeline.operators.operator import OperatorConfiguration


def test_the_oldest_version_ranks_and_nothing_else() -> None:
    order = EarliestDeadline(OperatorConfiguration())
    old, new = make_candidate(9, oldest_version=2, closed_ms=9), make_candidate(1, oldest_version=3, closed_ms=1)
    assert order.rank(old, make_moment()) < order.rank(new, make_moment())


def test_it_is_the_order_where_none_is_named() -> None:
    for operators in ((), ({"type": "edf"},)):
        feed = ServingFeed(*operators, depth=3)
        feed.open(range(4), version=0)
        for group, oldest in ((0, 2), (1, 1), (2, 0)):
            feed.keep(group, oldest, settle=False)
        feed.driver.settle()
        assert feed.batches() == [[2, 1]]
