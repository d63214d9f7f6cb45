"""GRPO: PPO's clipped loss on group advantages, plus a KL penalty to a frozen reference (docs/losses.md)."""

from typing import ClassVar

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.losses.kl import KLEstimator, kl_per_token
from headrace.trainers.losses.loss import LossOptions, LossTerms, Streams
from headrace.trainers.losses.ppo import PPO, PPOOptions

__all__ = ("GRPO", "GRPOOptions")


class GRPOOptions(PPOOptions):
    """kl_weight: beta of the penalty; 0 leaves the reference out. kl: the estimator."""

    kl_weight: float = 0.0
    kl: KLEstimator = "k3"


class GRPO(PPO):
    """PPO plus ``kl_weight * KL(new, ref)`` per token."""

    Options: ClassVar[type[LossOptions]] = GRPOOptions

    def __init__(self, options: GRPOOptions) -> None:
        super().__init__(options)
        self.penalty = options

    @property
    def needs_reference(self) -> bool:
        """True with a penalty."""
        return self.penalty.kl_weight > 0

    def __call__(self, streams: Streams) -> LossTerms:
        """See ``Loss``."""
        terms = super().__call__(streams)
        if not self.needs_reference:
            return terms
        if streams.ref is None:
            raise ConfigurationError("GRPO with kl_weight needs reference log-probs, and the backend gave none")
        kl = kl_per_token(streams.new, streams.ref, streams.mask, self.penalty.kl, self.penalty.log_ratio_limit)
        sums = {**terms.sums, "ref_kl": kl.detach().sum()}
        return LossTerms(loss=terms.loss + self.penalty.kl_weight * kl, sums=sums, peaks=terms.peaks)
