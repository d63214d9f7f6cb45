"""What dropping costs is told by the ledger: rewards and tokens of dropped and of trained groups."""

from __future__ import annotations

from collections.abc import Iterable

from stage_feed import make_opened

from headrace.pipeline.stale_bias import StaleBias
from headrace.schemas.records import Batched, Closed, Kept, Record


def stale(group: int, reward: float = 0.0, tokens: int = 0) -> Closed:
    return Closed(policy=0, group=group, reason="stale", by="batch", raw_mean=reward, tokens=tokens)


def of(opened: Iterable[int], *records: Record) -> StaleBias:
    bias = StaleBias()
    for record in (*map(make_opened, opened), *records):
        bias.fold(record)
    return bias


def test_without_a_dropped_group_there_is_no_bias() -> None:
    bias = of(range(2), Kept(policy=0, group=1, raw_mean=1.0), Batched(policy=0, batch=1, groups=[1]))
    assert bias.figures(50.0) == {}


def test_dropped_groups_stand_beside_the_trained_ones_and_unfinished_ones_apart() -> None:
    bias = of(range(10))
    for group, reward in ((1, 1.0), (2, 0.5), (3, 0.25), (4, 0.75), (5, 1.0)):
        bias.fold(Kept(policy=0, group=group, raw_mean=reward))
    bias.fold(Batched(policy=0, batch=1, groups=[1, 2]))
    bias.fold(stale(3, 0.25, 90))
    bias.fold(stale(4, 0.75, 110))
    bias.fold(stale(9))
    bias.fold(Closed(policy=0, group=5, reason="end", by="batch", raw_mean=1.0))
    bias.fold(stale(1, 1.0, 10))
    assert bias.figures(40.0) == {
        "groups": 3, "unfinished": 1, "reward": 0.5, "tokens": 100.0, "reward_trained": 0.75, "tokens_trained": 40.0,
    }, "the first ending record counts: 1 was batched"  # fmt: skip


def test_all_dropped_unfinished() -> None:
    bias = of(range(2), stale(1), stale(1))
    assert bias.figures(None) == {"groups": 1, "unfinished": 1}
