"""SAPO: a soft gate on the ratio instead of a clip."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.trainers.losses.anchored import Anchored, AnchoredOptions, Surrogate
from headrace.trainers.losses.loss import LossOptions, Streams, select

__all__ = ("SAPO", "SAPOOptions")


class SAPOOptions(AnchoredOptions):
    """tau_positive, tau_negative: steepness of the gate where the advantage is above 0, and elsewhere."""

    tau_positive: float = Field(1.0, gt=0)
    tau_negative: float = Field(1.05, gt=0)


class SAPO(Anchored):
    """``-A sigmoid(tau (r - 1)) 4 / tau``."""

    Options: ClassVar[type[LossOptions]] = SAPOOptions

    def __init__(self, options: SAPOOptions) -> None:
        super().__init__(options)
        self.options = options

    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """See ``Anchored``."""
        gain = select(streams.advantages, streams.mask)
        positive, negative = self.options.tau_positive, self.options.tau_negative
        tau = torch.where(gain > 0, torch.full_like(gain, positive), torch.full_like(gain, negative))
        return Surrogate(loss=select(-gain * torch.sigmoid(tau * (away.exp() - 1)) * 4 / tau, streams.mask))
