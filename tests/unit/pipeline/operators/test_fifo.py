"""``fifo``: by admission, whatever the age and the time of completion."""

from __future__ import annotations

from serving_feed import ServingFeed, make_candidate, make_moment

from headrace.pipeline.operators.fifo import AdmissionOrder
from headrace.pipeline.operators.operator import OperatorConfiguration


def test_the_group_admitted_first_ranks_first() -> None:
    order = AdmissionOrder(OperatorConfiguration())
    first, second = make_candidate(1, oldest_version=5, closed_ms=9), make_candidate(2, oldest_version=0, closed_ms=1)
    assert order.rank(first, make_moment()) < order.rank(second, make_moment())


def test_batches_go_by_admission_and_an_unfinished_group_holds_nobody_up() -> None:
    feed = ServingFeed({"type": "fifo"}, depth=3)
    feed.open(range(5))
    for group, oldest in ((4, 0), (3, 0), (1, 2)):
        feed.keep(group, oldest, settle=False)
    feed.driver.settle()
    assert feed.batches() == [[1, 3]]
