"""Which groups a batch takes: order, bound, and how many old ones it must take (protocol 4).

Pure functions over versions. ``oldest`` is the oldest version among a kept group's trained tokens, ``bound`` is A.
Staleness of a group in a batch is the batch's start version less ``oldest``.
"""

from collections.abc import Iterable, Mapping, Sequence

__all__ = ("candidates", "fits", "stale")


def stale(oldest: Mapping[int, int], start_version: int, bound: int) -> list[int]:
    """Groups that no batch may take any more, in order.

    >>> stale({1: 3, 2: 5}, start_version=6, bound=2)
    [1]
    """
    return sorted(g for g, version in oldest.items() if version < start_version - bound)


def candidates(oldest: Mapping[int, int], count: int) -> list[int]:
    """The ``count`` groups with the earliest last chance, ties by admission; at depth 0 that is admission order.

    >>> candidates({4: 1, 3: 2, 2: 1}, 2)
    [2, 4]
    """
    return sorted(oldest, key=lambda g: (oldest[g], g))[:count]


def fits(
    take: Sequence[int], kept: Mapping[int, int], open_bounds: Iterable[int], fresh: int, start_version: int, bound: int
) -> bool:
    """Whether later batches can hold what this one leaves behind.

    For every batch j in k .. k + A, ``take`` must hold at least min(F, n_j - (j - k) F) groups whose last chance is at
    most j; n_j counts the kept groups by their version and the open ones by their min version (protocol 4).

    >>> fits([1, 2], {1: 0, 2: 1, 3: 0}, [], fresh=2, start_version=1, bound=1)
    False
    """
    waiting = sorted(open_bounds)
    for later in range(bound + 1):
        last = start_version - bound + later
        due = sum(v <= last for v in kept.values()) + sum(v <= last for v in waiting)
        if sum(kept[g] <= last for g in take) < min(fresh, due - later * fresh):
            return False
    return True
