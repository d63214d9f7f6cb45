"""Truncated importance sampling: the plain policy gradient, weighted by prox / behave up to a cap."""

from typing import ClassVar

from headrace.trainers.losses.anchored import AnchoredOptions
from headrace.trainers.losses.correction import Correction
from headrace.trainers.losses.loss import LossOptions
from headrace.trainers.losses.reinforce import Reinforce

__all__ = ("TIS", "TISOptions")


class TISOptions(AnchoredOptions):
    """correction: per token, up to 2; for one weight a sequence ``{level = "sequence", product = true}``."""

    correction: Correction = Correction(level="token", action="clamp", upper=2.0)


class TIS(Reinforce):
    """``-A log(new) min(rho, C)`` with rho = prox / behave, or min(product of rho, C) at the level ``sequence``."""

    Options: ClassVar[type[LossOptions]] = TISOptions
