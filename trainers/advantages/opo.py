"""OPO's advantage: distance to the group's mean reward weighted by length, the baseline of least variance."""

from typing import ClassVar

from headrace.trainers.advantages.advantage import AdvantageOptions, GroupRewards, singletons

__all__ = ("OPO",)


class OPO:
    """``R - sum(length R) / sum(length)`` over the trained members of the group."""

    Options: ClassVar[type[AdvantageOptions]] = AdvantageOptions

    def __init__(self, options: AdvantageOptions) -> None:
        self.options = options

    def __call__(self, group: GroupRewards) -> list[float]:
        """See ``Advantage``."""
        if group.count <= 1:
            return singletons(group, self.options)
        lengths = group.lengths or [1] * len(group.rewards)
        total = sum(lengths)
        if not total:
            return [0.0 for _ in group.rewards]
        baseline = sum(n * r for n, r in zip(lengths, group.rewards, strict=True)) / total
        return [reward - baseline for reward in group.rewards]
