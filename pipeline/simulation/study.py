"""A study: one figure of a paper, measured over seeds, as rows (paper, ours, ratio) and charts.

``measure(seed)`` gives named numbers of one seed; ``means`` averages them over seeds, several at a time.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

__all__ = ("Chart", "Measure", "Result", "Row", "Study", "means")

Measure = Callable[[int], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Row:
    """One number beside the paper's; ``paper`` None where the paper's text gives none."""

    name: str
    ours: float
    paper: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return self.ours / self.paper if self.paper else None


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a number each, or (without points) bars by name."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    bars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """What a study found."""

    rows: Sequence[Row]
    charts: Sequence[Chart] = ()


@dataclass(frozen=True, slots=True)
class Study:
    """A figure that can be made again: ``tell`` puts the means of ``measure`` beside the paper.

    why: what of the product makes the difference, or why it cannot.
    """

    name: str
    title: str
    why: str
    measure: Measure
    tell: Callable[[Mapping[str, float]], Result]

    def run(self, seeds: Sequence[int], jobs: int = 0) -> Result:
        """Measure every seed and tell the means."""
        return self.tell(means(self.measure, seeds, jobs))


def means(measure: Measure, seeds: Sequence[int], jobs: int = 0) -> dict[str, float]:
    """The mean of every number over the seeds, ``jobs`` seeds at a time (0: one for each core)."""
    jobs = min(jobs or os.cpu_count() or 1, len(seeds))
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            found = list(pool.map(measure, seeds))
    else:
        found = [measure(seed) for seed in seeds]
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}
