"""CISPO: the policy gradient weighted by a clipped ratio that carries no gradient, so that no token is lost."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from headrace.trainers.losses.anchored import Anchored, AnchoredOptions, Surrogate
from headrace.trainers.losses.loss import LossOptions, Streams, finite_logprobs, select

__all__ = ("CISPO", "CISPOOptions")


class CISPOOptions(AnchoredOptions):
    """clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]. unified_mask: drop the tokens that
    PPO's clip would drop.
    """

    anchor: Literal["prox", "behave"] = "behave"
    clip_low: float = Field(1.0, ge=0)
    clip_high: float = Field(4.0, ge=0)
    unified_mask: bool = False


class CISPO(Anchored):
    """``-clip(r) A log(new)``."""

    Options: ClassVar[type[LossOptions]] = CISPOOptions

    def __init__(self, options: CISPOOptions) -> None:
        super().__init__(options)
        self.options = options

    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """See ``Anchored``."""
        o = self.options
        ratio = away.detach().exp()
        gain = select(streams.advantages, streams.mask)
        above, below = ratio > 1 + o.clip_high, ratio < 1 - o.clip_low
        weight = ratio.clamp(1 - o.clip_low, 1 + o.clip_high)
        if o.unified_mask:
            weight = weight * ~((gain > 0) & above | (gain < 0) & below)
        loss = -weight * gain * finite_logprobs(streams.new, streams.mask)
        clipped = select((above | below).to(loss.dtype), streams.mask)
        return Surrogate(loss=loss, sums={"clip_fraction": clipped.sum()})
