"""IPO: DPPO's trust region on both sides, whatever the sign of the advantage."""

from typing import ClassVar

from pydantic import Field

from headrace.trainers.losses.dppo import DPPO, DPPOOptions
from headrace.trainers.losses.loss import LossOptions

__all__ = ("IPO", "IPOOptions")


class IPOOptions(DPPOOptions):
    """DPPO's options with a region of 0.1 in probability to both sides."""

    low: float = Field(0.1, ge=0)
    high: float = Field(0.1, ge=0)
    both_sides: bool = True


class IPO(DPPO):
    """``-A r keep + square_weight log(r)^2`` without tokens whose probability moved by more than 0.1 either way."""

    Options: ClassVar[type[LossOptions]] = IPOOptions
