"""Decoupled PPO: the clip is on new / prox, a weight prox / behave accounts for staleness (docs/losses.md).

Three named streams go in: behave (as sampled, any mix of versions), prox (the policy at the start of the step) and new.
"""

from typing import ClassVar

from headrace.trainers.losses.clip import ClipOptions, clipped_surrogate
from headrace.trainers.losses.correction import Correction, correction_weights
from headrace.trainers.losses.loss import LossOptions, LossTerms, Streams, log_ratio, token_sums

__all__ = ("DecoupledPPO", "DecoupledPPOOptions")


class DecoupledPPOOptions(ClipOptions):
    """behave: how prox / behave becomes the weight; by default the token's ratio clamped to 2."""

    behave: Correction = Correction()


class DecoupledPPO:
    """``max(-A r, -A clip(r)) * rho`` with r = new / prox and rho = prox / behave, masked or clamped at its cap.

    At one update per batch prox equals new in value, so the gradient is that of ``-A rho log(new)``; the clip acts from
    the second update on. The weight is also the correction of engine mismatch, which is why it is on at every depth.
    """

    Options: ClassVar[type[LossOptions]] = DecoupledPPOOptions

    def __init__(self, options: DecoupledPPOOptions) -> None:
        self.options = options

    @property
    def corrects_staleness(self) -> bool:
        """True unless the behave weight is off."""
        return self.options.behave.action != "off"

    @property
    def needs_reference(self) -> bool:
        """Decoupled PPO needs none."""
        return False

    def __call__(self, streams: Streams) -> LossTerms:
        """See ``Loss``."""
        o = self.options
        away = log_ratio(streams.new, streams.prox, streams.mask, o.log_ratio_limit)
        part = clipped_surrogate(away, streams.advantages, streams.mask, o)
        rho = correction_weights(streams.prox, streams.behave, streams.mask, o.behave, o.log_ratio_limit)
        sums = token_sums(streams, o.log_ratio_limit)
        sums["clip_fraction"], sums["clip_fraction_dual"] = part.clipped.sum(), part.dual.sum()
        sums["prox_kl"] = -away.detach().sum()
        sums["behave_weight"], sums["behave_kept"] = rho.weight.sum(), rho.kept.sum()
        peaks = {"ratio/max": away.detach().exp().amax(), "behave_weight/max": rho.weight.amax()}
        return LossTerms(loss=part.loss * rho.weight, sums=sums, peaks=peaks)
