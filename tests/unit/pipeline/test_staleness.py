"""Order, bound and the look-ahead of ``wait``: what it takes never leaves more than later batches can hold."""

from __future__ import annotations

from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.pipeline.staleness import chosen, fits, stale


def test_stale_is_over_the_bound_and_equality_is_kept() -> None:
    assert stale({1: 3, 2: 4, 3: 9}, start_version=6, bound=2) == [1]
    assert stale({1: 3}, start_version=6, bound=3) == []


def by_age(kept: dict[int, int]) -> list[int]:
    return sorted(kept, key=lambda g: (kept[g], g))


def test_the_order_decides_but_for_what_has_its_last_chances() -> None:
    kept = {9: 2, 3: 2, 7: 0}
    assert chosen([9, 3, 7], kept, [], fresh=2, start_version=2, bound=3) == [9, 3]
    assert chosen([9, 3, 7], kept, [], fresh=2, start_version=2, bound=2) == [9, 7], "7 may not wait"
    assert chosen([9], {9: 2}, [], fresh=5, start_version=2, bound=2) == [9]
    assert chosen([1, 2, 3], {1: 3, 2: 3, 3: 3}, [2, 2], fresh=2, start_version=3, bound=1) == [1, 2]


def test_fits_looks_at_open_groups_too() -> None:
    assert fits([1], {1: 5}, [], fresh=1, start_version=5, bound=1)
    assert not fits([1], {1: 6}, [4, 4], fresh=1, start_version=5, bound=1)
    assert fits([1], {1: 4}, [4], fresh=1, start_version=5, bound=1)


def test_a_batch_that_looks_after_its_own_last_chances_only_leaves_too_many() -> None:
    kept = {1: 6, 2: 6}
    assert not fits([1, 2], kept, [5, 5, 5], fresh=2, start_version=6, bound=2)
    assert fits([1, 2], kept, [5, 5], fresh=2, start_version=6, bound=2)


@settings(max_examples=300, deadline=None)
@given(
    fresh=st.integers(1, 4),
    bound=st.integers(0, 3),
    versions=st.lists(st.integers(0, 3), max_size=14),
)
def test_earliest_last_chance_first_loses_nothing_that_some_order_could_hold(
    fresh: int, bound: int, versions: list[int]
) -> None:
    start = 3
    kept = {g: start - bound + min(v, bound) for g, v in enumerate(versions)}
    for later in range(bound + 1):
        assume(sum(v <= start - bound + later for v in kept.values()) <= (later + 1) * fresh)
    while len(kept) >= fresh:
        take = by_age(kept)[:fresh]
        assert chosen(by_age(kept), kept, [], fresh, start, bound) == take, "the earliest last chance is enough"
        assert fits(take, kept, [], fresh, start, bound)
        for group in take:
            del kept[group]
        start += 1
        assert stale(kept, start, bound) == []


@settings(max_examples=300, deadline=None)
@given(
    fresh=st.integers(1, 4),
    bound=st.integers(0, 3),
    versions=st.lists(st.integers(0, 4), max_size=12),
    opened=st.lists(st.integers(0, 4), max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_whatever_the_order_a_batch_is_made_when_the_oldest_first_would_be_one(
    fresh: int, bound: int, versions: list[int], opened: list[int], order: Random
) -> None:
    start = 4
    kept = {g: start - bound + min(v, bound) for g, v in enumerate(versions)}
    ranked = order.sample(list(kept), len(kept))
    take = chosen(ranked, kept, opened, fresh, start, bound)
    assert len(take) == min(fresh, len(kept)) and len(set(take)) == len(take)
    assert take == [g for g in ranked if g in set(take)], "in the order asked for"
    oldest = by_age(kept)[:fresh]
    assert fits(take, kept, opened, fresh, start, bound) == fits(oldest, kept, opened, fresh, start, bound)
    left_out = [g for g in ranked if g not in set(take)]
    for better in left_out:  # no group left out could take the place of a worse one
        for worse in (g for g in take if ranked.index(g) > ranked.index(better)):
            other = [better if g == worse else g for g in take]
            assert not (
                fits(other, kept, opened, fresh, start, bound) and fits(take, kept, opened, fresh, start, bound)
            )
