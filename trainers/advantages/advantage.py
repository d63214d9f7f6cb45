"""The contracts of an advantage: rewards of a group, or the trajectories of a whole batch, in; advantages out.

Statistics of a group come from the Group record, over every member that counts, also those that are not trained; so
they are the same whatever was downsampled, however a batch is split, and for replayed members (docs/losses.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from headrace.trainers.losses.kl import KLEstimator

__all__ = (
    "AddUp",
    "Advantage",
    "AdvantageOptions",
    "BatchAdvantage",
    "Floats",
    "GroupRewards",
    "Needs",
    "Scored",
    "TokenAdvantages",
    "singletons",
)

Floats = npt.NDArray[np.float64]
AddUp = Callable[[Mapping[str, float]], dict[str, float]]
"""Adds named numbers up over all ranks; collective, so every rank calls it equally often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """Shaped rewards of the trained members of a group; mean, unbiased deviation and count over all that count.

    lengths: trained tokens of each member. parts: the named parts of each member's reward. Both may be left out.
    """

    rewards: Sequence[float]
    mean: float
    std: float
    count: int
    lengths: Sequence[int] = ()
    parts: Sequence[Mapping[str, float]] = ()


class AdvantageOptions(BaseModel):
    """``trainer.advantage_options``: unknown keys are refused.

    singleton: what the only counted member of a group gets: 0 (nothing can be learnt from it) or its raw reward.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    singleton: Literal["zero", "raw"] = "zero"


class Advantage(Protocol):
    """An advantage from one group; found by name in the entry point group ``headrace.advantages`` as a class made from
    its Options.
    """

    Options: ClassVar[type[AdvantageOptions]]

    def __call__(self, group: GroupRewards) -> list[float]:
        """One value per trained member (or role of one), broadcast to its sequences and tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an advantage looks at beyond rewards: a critic's values; the estimated KL of behave to a reference."""

    values: bool = False
    kl: KLEstimator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One trained trajectory of a batch, or one role of it where those are rewarded apart.

    group: key of what it is compared with; mean, std, count: of that, as in ``GroupRewards``. reward: shaped.
    turn_rewards: parts that belong to a turn. For each trained sequence in order: masks bool [length], roles, and where
    they were asked for values (of the state before each token) and kl (of each token), float [length].
    """

    group: tuple[int, int] | tuple[int, int, str]
    reward: float
    mean: float
    std: float
    count: int
    masks: Sequence[npt.NDArray[np.bool_]]
    roles: Sequence[str]
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    values: Sequence[npt.NDArray[np.floating]] = ()
    kl: Sequence[npt.NDArray[np.floating]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """Advantages of a trajectory's trained sequences, float64 [length] each, 0 outside the mask.

    returns: what a critic is trained towards, in the same shape; empty where there is none.
    """

    advantages: Sequence[Floats]
    returns: Sequence[Floats] = ()


@runtime_checkable
class BatchAdvantage(Protocol):
    """An advantage that looks at a whole batch or at single tokens; found like ``Advantage``."""

    Options: ClassVar[type[AdvantageOptions]]

    @property
    def needs(self) -> Needs:
        """What ``Scored`` has to hold."""
        ...

    def of_batch(self, members: Sequence[Scored], add_up: AddUp) -> list[TokenAdvantages]:
        """Of each of this rank's trajectories; collective. Whole groups are on one rank."""
        ...


def singletons(group: GroupRewards, options: AdvantageOptions) -> list[float]:
    """The advantages of a group of which one member counts."""
    return [reward if options.singleton == "raw" else 0.0 for reward in group.rewards]
