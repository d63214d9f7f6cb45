"""MaxRL's advantage: distance to the group's mean reward in units of that mean, so that hard prompts weigh more."""

from typing import ClassVar

from headrace.trainers.advantages.advantage import AdvantageOptions, GroupRewards, singletons

__all__ = ("MaxRL",)


class MaxRL:
    """``(R - mean) / mean`` for rewards that are not negative; 0 for every member when the mean is 0 or below."""

    Options: ClassVar[type[AdvantageOptions]] = AdvantageOptions

    def __init__(self, options: AdvantageOptions) -> None:
        self.options = options

    def __call__(self, group: GroupRewards) -> list[float]:
        """See ``Advantage``."""
        if group.count <= 1:
            return singletons(group, self.options)
        if group.mean <= 0:
            return [0.0 for _ in group.rewards]
        return [(reward - group.mean) / group.mean for reward in group.rewards]
