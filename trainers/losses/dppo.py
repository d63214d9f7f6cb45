"""DPPO: the policy gradient on new / behave, without tokens whose probability has moved too far already."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from headrace.trainers.losses.anchored import Anchored, AnchoredOptions, Surrogate
from headrace.trainers.losses.loss import FAR, LossOptions, Streams, finite_logprobs, log_ratio, select

__all__ = ("DPPO", "DPPOOptions")


class DPPOOptions(AnchoredOptions):
    """low, high: largest fall and rise of a token's probability. both_sides: drop whatever the sign of the advantage.
    square_weight: of the squared log ratio.
    """

    anchor: Literal["prox", "behave"] = "behave"
    low: float = Field(0.2, ge=0)
    high: float = Field(0.2, ge=0)
    both_sides: bool = False
    square_weight: float = Field(1e-3, ge=0)


class DPPO(Anchored):
    """``-A r keep + square_weight log(r)^2``; dropped: A > 0 and the probability rose by more than high, or A <= 0 and
    it fell by more than low. The square of a dropped token still counts.
    """

    Options: ClassVar[type[LossOptions]] = DPPOOptions

    def __init__(self, options: DPPOOptions) -> None:
        super().__init__(options)
        self.options = options

    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """See ``Anchored``."""
        o = self.options
        gain = select(streams.advantages, streams.mask)
        old = self.anchor(streams)
        far = log_ratio(streams.new, old, streams.mask, FAR)
        rise = finite_logprobs(streams.new.detach(), streams.mask).exp() - finite_logprobs(old, streams.mask).exp()
        above, below = rise > o.high, rise < -o.low
        dropped = above | below if o.both_sides else (gain > 0) & above | (gain <= 0) & below
        kept = select((~dropped).to(away.dtype), streams.mask)
        loss = -gain * away.exp() * kept + o.square_weight * far * far
        left = select(dropped.to(away.dtype), streams.mask).sum()
        return Surrogate(loss=select(loss, streams.mask), sums={"clip_fraction": left})
