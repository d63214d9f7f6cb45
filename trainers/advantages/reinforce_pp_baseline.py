"""REINFORCE++ with a baseline: the reward less the group's mean, whitened over all tokens of the batch."""

from typing import ClassVar, Literal

from headrace.trainers.advantages.advantage import AdvantageOptions
from headrace.trainers.advantages.returns import Returns, ReturnsOptions

__all__ = ("ReinforcePPBaseline", "ReinforcePPBaselineOptions")


class ReinforcePPBaselineOptions(ReturnsOptions):
    """REINFORCE++'s options; the reward is taken relative to the group."""

    reward: Literal["shaped", "centered", "normalized"] = "centered"


class ReinforcePPBaseline(Returns):
    """``whiten(R - mean)``; with ``reward = "normalized"`` the doubly normalised advantage of AReaL and AstraFlow."""

    Options: ClassVar[type[AdvantageOptions]] = ReinforcePPBaselineOptions
