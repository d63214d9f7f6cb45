"""What advantages share that give every token of a trajectory the same value, made from figures of a whole batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from headrace.trainers.advantages.advantage import AddUp, AdvantageOptions, Needs, Scored, TokenAdvantages

__all__ = ("PerMember",)


class PerMember(ABC):
    """See ``BatchAdvantage``; a subclass gives one value per trajectory."""

    Options: ClassVar[type[AdvantageOptions]] = AdvantageOptions

    @property
    def needs(self) -> Needs:
        """Nothing beyond rewards."""
        return Needs()

    @abstractmethod
    def values_of(self, members: Sequence[Scored], add_up: AddUp) -> list[float]:
        """One value for each trajectory; collective."""

    def of_batch(self, members: Sequence[Scored], add_up: AddUp) -> list[TokenAdvantages]:
        """See ``BatchAdvantage``."""
        values = self.values_of(members, add_up)
        return [
            TokenAdvantages(advantages=[np.where(mask, value, 0.0) for mask in member.masks])
            for member, value in zip(members, values, strict=True)
        ]
