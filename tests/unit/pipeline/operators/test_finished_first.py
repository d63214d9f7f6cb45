"""``finished_first``: by completion; under ``wait`` what would pass the bound goes before it."""

from __future__ import annotations

import pytest
from serving_feed import ServingFeed, make_candidate, make_moment

from headrace.pipeline.operators.finished_first import FinishedFirst
from headrace.pipeline.operators.operator import OperatorConfiguration


def test_the_group_that_closed_first_ranks_first() -> None:
    order = FinishedFirst(OperatorConfiguration())
    early, late = make_candidate(9, oldest_version=5, closed_ms=1), make_candidate(1, oldest_version=0, closed_ms=2)
    assert order.rank(early, make_moment()) < order.rank(late, make_moment())


@pytest.mark.parametrize(("mode", "second", "lost"), [("drop", [5, 6], [0]), ("wait", [5, 0], [])])
def test_the_bound_goes_before_the_order_only_where_it_is_waited_for(
    mode: str, second: list[int], lost: list[int]
) -> None:
    """Group 0 is old and finishes last: it would pass the bound with the second batch."""
    feed = ServingFeed({"type": "finished_first"}, depth=1, max_staleness=1, mode=mode)
    feed.open([0, 3, 4])
    for group in (3, 4):
        feed.keep(group, settle=False)
    feed.driver.settle()
    assert feed.batches() == [[3, 4]]
    feed.step()
    feed.open([5, 6, 7], version=1)
    for at, (group, oldest) in enumerate(((5, 1), (6, 1), (0, 0), (7, 1))):
        feed.keep(group, oldest, settle=False, closed_ms=at)
    feed.driver.settle()
    assert feed.batches()[1] == second
    feed.step()
    assert [r.group for r in feed.closed() if r.reason == "stale"] == lost
