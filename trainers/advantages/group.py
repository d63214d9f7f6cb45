"""GRPO's advantage: distance to the group's mean reward in units of its deviation."""

from typing import ClassVar

from pydantic import Field

from headrace.trainers.advantages.advantage import AdvantageOptions, GroupRewards, singletons

__all__ = ("GroupNormalized", "GroupNormalizedOptions")


class GroupNormalizedOptions(AdvantageOptions):
    """epsilon: added to the deviation."""

    epsilon: float = Field(1e-6, ge=0)


class GroupNormalized:
    """``(R - mean) / (std + epsilon)``; 0 for every member when all rewards are equal."""

    Options: ClassVar[type[AdvantageOptions]] = GroupNormalizedOptions

    def __init__(self, options: GroupNormalizedOptions) -> None:
        self.options = options

    def __call__(self, group: GroupRewards) -> list[float]:
        """See ``Advantage``."""
        if group.count <= 1:
            return singletons(group, self.options)
        if group.std <= 0:
            return [0.0 for _ in group.rewards]
        return [(reward - group.mean) / (group.std + self.options.epsilon) for reward in group.rewards]
