"""GMPO: the policy gradient on the geometric mean of a sequence's ratios, each clipped before the mean is taken."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.trainers.losses.anchored import Anchored, AnchoredOptions, Surrogate
from headrace.trainers.losses.loss import LossOptions, Streams, select

__all__ = ("GMPO", "GMPOOptions")


class GMPOOptions(AnchoredOptions):
    """clip_low, clip_high: log ratios are clipped to [-clip_low, clip_high] where that makes the loss larger; combine
    with ``trainer.aggregation = "seq-mean-token-mean"``.
    """

    clip_low: float = Field(0.4, ge=0)
    clip_high: float = Field(0.4, ge=0)


class GMPO(Anchored):
    """``-A exp(mean of s min(s d, s clip(d)))`` with d = log(new / prox) and s the sign of A, at each token."""

    Options: ClassVar[type[LossOptions]] = GMPOOptions

    def __init__(self, options: GMPOOptions) -> None:
        super().__init__(options)
        self.options = options

    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """See ``Anchored``."""
        o, mask = self.options, streams.mask
        gain = select(streams.advantages, mask)
        sign = gain.sign()
        bound = away.clamp(-o.clip_low, o.clip_high)
        taken = sign * torch.minimum(sign * away, sign * bound)
        lengths = mask.sum(-1, keepdim=True).clamp(min=1).to(away.dtype)
        ratio = (select(taken, mask).sum(-1, keepdim=True) / lengths).exp()
        clipped = select((sign * away > sign * bound).to(away.dtype), mask)
        mean_gain = gain.sum(-1, keepdim=True) / lengths
        return Surrogate(loss=select((-mean_gain * ratio).expand_as(away), mask), sums={"clip_fraction": clipped.sum()})
