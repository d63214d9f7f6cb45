"""The contract of an advantage: the rewards of a group in, one advantage per trained member out (docs/losses.md).

Statistics come from the Group record, over every member that counts, also those that are not trained; so they are the
same whatever was downsampled, however a batch is split, and for replayed members.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

__all__ = ("Advantage", "AdvantageOptions", "GroupRewards")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """Shaped rewards of the trained members of a group; mean, unbiased deviation and count over all that count."""

    rewards: Sequence[float]
    mean: float
    std: float
    count: int


class AdvantageOptions(BaseModel):
    """``trainer.advantage_options``: unknown keys are refused.

    singleton: what the only counted member of a group gets: 0 (nothing can be learnt from it) or its raw reward.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    singleton: Literal["zero", "raw"] = "zero"


class Advantage(Protocol):
    """An advantage; found by name in the entry point group ``headrace.advantages`` as a class made from its Options."""

    Options: ClassVar[type[AdvantageOptions]]

    def __call__(self, group: GroupRewards) -> list[float]:
        """One value per trained member, broadcast to its sequences and tokens."""
        ...


def singletons(group: GroupRewards, options: AdvantageOptions) -> list[float]:
    """The advantages of a group of which one member counts."""
    return [reward if options.singleton == "raw" else 0.0 for reward in group.rewards]
