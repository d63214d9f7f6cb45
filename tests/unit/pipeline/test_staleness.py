"""Order, bound and the look-ahead of ``wait``: what it takes never leaves more than later batches can hold."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.pipeline.staleness import candidates, fits, stale


def test_stale_is_over_the_bound_and_equality_is_kept() -> None:
    assert stale({1: 3, 2: 4, 3: 9}, start_version=6, bound=2) == [1]
    assert stale({1: 3}, start_version=6, bound=3) == []


def test_candidates_go_by_last_chance_then_by_admission() -> None:
    assert candidates({9: 2, 3: 2, 7: 0}, 2) == [7, 3]
    assert candidates({9: 2}, 5) == [9]


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
        take = candidates(kept, fresh)
        assert fits(take, kept, [], fresh, start, bound)
        for group in take:
            del kept[group]
        start += 1
        assert stale(kept, start, bound) == []
