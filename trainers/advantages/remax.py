"""ReMax's advantage: distance to the reward of a greedy completion, which the reward brings as a named part."""

from typing import ClassVar

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.advantages.advantage import AdvantageOptions, GroupRewards

__all__ = ("ReMax", "ReMaxOptions")


class ReMaxOptions(AdvantageOptions):
    """baseline: name of the part of the reward that holds the greedy completion's reward."""

    baseline: str = "greedy"


class ReMax:
    """``R - baseline``; the baseline is no part of R. Raises ConfigurationError when a member has none."""

    Options: ClassVar[type[AdvantageOptions]] = ReMaxOptions

    def __init__(self, options: ReMaxOptions) -> None:
        self.options = options

    def __call__(self, group: GroupRewards) -> list[float]:
        """See ``Advantage``."""
        name = self.options.baseline
        if len(group.parts) != len(group.rewards) or any(name not in parts for parts in group.parts):
            raise ConfigurationError(
                f"advantage remax needs a part {name!r} in every trajectory's reward: let the reward or workflow score "
                "a greedy completion, or set trainer.advantage_options.baseline to its name"
            )
        return [reward - parts[name] for reward, parts in zip(group.rewards, group.parts, strict=True)]
