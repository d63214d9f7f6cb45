"""GSPO: PPO on the geometric mean of a sequence's ratios."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from headrace.trainers.losses.anchored import Surrogate
from headrace.trainers.losses.clip import DualClip
from headrace.trainers.losses.loss import FAR, LossOptions, Streams, finite_logprobs, log_ratio, select
from headrace.trainers.losses.ppo import PPO, PPOOptions

__all__ = ("GSPO", "GSPOOptions")


class GSPOOptions(PPOOptions):
    """PPO's options with GSPO's narrow clip; combine with ``trainer.aggregation = "seq-mean-token-mean"``."""

    clip_low: float = Field(3e-4, ge=0)
    clip_high: float = Field(4e-4, ge=0)
    dual_clip: DualClip = 0.0


class GSPO(PPO):
    """PPO with r = exp(mean over the sequence of log(new / prox)), whose gradient spreads evenly over its tokens."""

    Options: ClassVar[type[LossOptions]] = GSPOOptions

    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """See ``Anchored``."""
        lengths = streams.mask.sum(-1, keepdim=True).clamp(min=1).to(away.dtype)
        far = log_ratio(streams.new.detach(), self.anchor(streams), streams.mask, FAR)
        limit = self.options.log_ratio_limit
        mean = (far.sum(-1, keepdim=True) / lengths).clamp(-limit, limit)
        new = finite_logprobs(streams.new, streams.mask)
        return super().surrogate(select(mean + new - new.detach(), streams.mask), streams)
