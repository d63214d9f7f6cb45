"""Dr. GRPO's advantage: distance to the group's mean reward, not divided by the deviation."""

from typing import ClassVar

from headrace.trainers.advantages.advantage import AdvantageOptions, GroupRewards, singletons

__all__ = ("GroupCentered",)


class GroupCentered:
    """``R - mean``."""

    Options: ClassVar[type[AdvantageOptions]] = AdvantageOptions

    def __init__(self, options: AdvantageOptions) -> None:
        self.options = options

    def __call__(self, group: GroupRewards) -> list[float]:
        """See ``Advantage``."""
        if group.count <= 1:
            return singletons(group, self.options)
        return [reward - group.mean for reward in group.rewards]
