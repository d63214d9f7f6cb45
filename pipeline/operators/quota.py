"""Target shares over classes that are met exactly in the long run, whatever comes in which order.

In: weights by class and what was admitted; out: which class is owed most, or whether one more of a class would be too
many. Counts are whole numbers, so nothing drifts, however long a run is.
"""

from collections.abc import Collection, Mapping

__all__ = ("Quota",)


class Quota:
    """Counts of what was admitted by class, against weights > 0 that need not sum to 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = {name: weight for name, weight in weights.items() if weight > 0}
        self._sum = sum(self._weights.values())
        self.counts: dict[str, int] = dict.fromkeys(self._weights, 0)

    def share(self, name: str) -> float:
        """Target share of a class; 0 for one without a weight."""
        return self._weights.get(name, 0.0) / self._sum

    def add(self, name: str) -> None:
        """Count one admission; classes without a weight are not counted."""
        if name in self.counts:
            self.counts[name] += 1

    def most_owed(self, names: Collection[str]) -> str:
        """Of some classes the one whose turn it is, by Webster's rule: least ``(count + 1/2) / weight``.

        Ties go to the class that was configured first. Raises ValueError when none of the names has a weight.
        """
        order = [name for name in self._weights if name in names]
        return min(order, key=lambda name: (self.counts[name] + 0.5) / self._weights[name])

    def surplus(self, name: str) -> float:
        """How many admissions a class would be above its share of all with one more.

        The mean over K classes is 1 - 1/K, so some class is always below 1; admitting only there holds each within K of
        its target at any time.
        """
        total = sum(self.counts.values()) + 1
        return self.counts[name] + 1 - self.share(name) * total
