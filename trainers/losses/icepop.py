"""IcePop: PPO without the tokens on which trainer and engine disagree, in either direction."""

from typing import ClassVar

from headrace.trainers.losses.correction import Correction
from headrace.trainers.losses.loss import LossOptions
from headrace.trainers.losses.ppo import PPO, PPOOptions

__all__ = ("IcePop", "IcePopOptions")


class IcePopOptions(PPOOptions):
    """correction: the weight is prox / behave inside 0.5 to 5, and 0 outside."""

    correction: Correction = Correction(action="mask", lower=0.5, upper=5.0)


class IcePop(PPO):
    """``max(-A r, -A clip(r)) rho`` where rho = prox / behave is inside its bounds, else 0."""

    Options: ClassVar[type[LossOptions]] = IcePopOptions
