"""The advantage for pass@k: only the best of a group learns, by its lead over the second best."""

from typing import ClassVar

from pydantic import Field

from headrace.trainers.advantages.advantage import AdvantageOptions, GroupRewards

__all__ = ("PassAtK", "PassAtKOptions")


class PassAtKOptions(AdvantageOptions):
    """normalize: divide by the group's deviation (plus epsilon)."""

    normalize: bool = True
    epsilon: float = Field(1e-6, gt=0)


class PassAtK:
    """``(best - second best) / (std + epsilon)`` for the best trained member of a group, 0 for the others."""

    Options: ClassVar[type[AdvantageOptions]] = PassAtKOptions

    def __init__(self, options: PassAtKOptions) -> None:
        self.options = options

    def __call__(self, group: GroupRewards) -> list[float]:
        """See ``Advantage``. Best and second are of the trained members: give them all to it, without downsampling."""
        out = [0.0 for _ in group.rewards]
        if len(out) < 2:
            return out
        order = sorted(range(len(out)), key=lambda at: group.rewards[at])
        lead = group.rewards[order[-1]] - group.rewards[order[-2]]
        out[order[-1]] = lead / (group.std + self.options.epsilon) if self.options.normalize else lead
        return out
