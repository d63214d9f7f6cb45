"""RLOO's advantage: distance to the mean reward of the other members of the group."""

from typing import ClassVar

from headrace.trainers.advantages.advantage import AdvantageOptions, GroupRewards, singletons

__all__ = ("LeaveOneOut",)


class LeaveOneOut:
    """``R - mean of the others``, which is ``(R - mean) * n / (n - 1)`` for n counted members."""

    Options: ClassVar[type[AdvantageOptions]] = AdvantageOptions

    def __init__(self, options: AdvantageOptions) -> None:
        self.options = options

    def __call__(self, group: GroupRewards) -> list[float]:
        """See ``Advantage``."""
        if group.count <= 1:
            return singletons(group, self.options)
        scale = group.count / (group.count - 1)
        return [(reward - group.mean) * scale for reward in group.rewards]
