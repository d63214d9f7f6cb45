"""Which groups a batch takes: the bound, and how many old ones it must take whatever their order (protocol 4).

Pure functions over versions. ``oldest`` is the oldest version among a kept group's trained tokens, ``bound`` is A.
Staleness of a group in a batch is the batch's start version less ``oldest``.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ("chosen", "fits", "stale")


def stale(oldest: Mapping[int, int], start_version: int, bound: int) -> list[int]:
    """Groups that no batch may take any more, in order.

    >>> stale({1: 3, 2: 5}, start_version=6, bound=2)
    [1]
    """
    return sorted(g for g, version in oldest.items() if version < start_version - bound)


def chosen(
    ranked: Sequence[int],
    kept: Mapping[int, int],
    open_bounds: Iterable[int],
    fresh: int,
    start_version: int,
    bound: int,
) -> list[int]:
    """The groups that a batch takes under ``wait``, in the order of ``ranked``: up to ``fresh`` of the first of them,
    but as many of the old ones as ``fits`` asks for, wherever these stand.

    >>> chosen([3, 2, 1], {1: 0, 2: 1, 3: 1}, [], fresh=2, start_version=1, bound=1)
    [3, 1]
    """
    taken: list[int] = []
    for last, least in _least(kept.values(), open_bounds, fresh, start_version, bound):
        missing = least - sum(kept[g] <= last for g in taken)
        if missing > 0:
            inside = set(taken)
            taken += [g for g in ranked if kept[g] <= last and g not in inside][:missing]
    inside = set(taken)
    taken += [g for g in ranked if g not in inside][: fresh - len(taken)]
    inside = set(taken)
    return [g for g in ranked if g in inside]


def fits(
    take: Sequence[int], kept: Mapping[int, int], open_bounds: Iterable[int], fresh: int, start_version: int, bound: int
) -> bool:
    """Whether later batches can hold what this one leaves behind.

    For every batch j in k .. k + A, ``take`` must hold at least min(F, n_j - (j - k) F) groups whose last chance is at
    most j; n_j counts the kept groups by their version and the open ones by their min version (protocol 4).

    >>> fits([1, 2], {1: 0, 2: 1, 3: 0}, [], fresh=2, start_version=1, bound=1)
    False
    """
    return all(
        sum(kept[g] <= last for g in take) >= least
        for last, least in _least(kept.values(), open_bounds, fresh, start_version, bound)
    )


def _least(
    kept: Iterable[int], open_bounds: Iterable[int], fresh: int, start_version: int, bound: int
) -> Iterator[tuple[int, int]]:
    """(version, how many groups at most that old this batch must take), for every later batch that can ask for any."""
    versions = sorted([*kept, *open_bounds])
    for later in range(min(bound, len(versions) // fresh) + 1):
        last = start_version - bound + later
        yield last, min(fresh, bisect_right(versions, last) - later * fresh)
