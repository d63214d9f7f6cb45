"""PPO's clipped loss on the ratio new / prox or new / behave, with the engine-mismatch correction."""

from typing import ClassVar, Literal

from headrace.trainers.losses.clip import ClipOptions, clipped_surrogate
from headrace.trainers.losses.correction import Correction, correction_weights
from headrace.trainers.losses.loss import LossOptions, LossTerms, Streams, log_ratio, token_sums

__all__ = ("PPO", "PPOOptions")


class PPOOptions(ClipOptions):
    """anchor: the ratio's denominator. correction: weights by prox / behave, truncated at 2; unused on ``behave``."""

    anchor: Literal["prox", "behave"] = "prox"
    correction: Correction = Correction()


class PPO:
    """``max(-A r, -A clip(r)) * w``: w truncates prox / behave at the cap of ``correction`` when r is new / prox.

    With the anchor ``behave`` the ratio itself carries the correction, and w is 1.
    """

    Options: ClassVar[type[LossOptions]] = PPOOptions

    def __init__(self, options: PPOOptions) -> None:
        self.options = options

    @property
    def corrects_staleness(self) -> bool:
        """True on the anchor ``behave`` and whenever the correction is on."""
        return self.options.anchor == "behave" or self.options.correction.action != "off"

    @property
    def needs_reference(self) -> bool:
        """PPO needs none."""
        return False

    def __call__(self, streams: Streams) -> LossTerms:
        """See ``Loss``."""
        o = self.options
        anchor = streams.behave if o.anchor == "behave" else streams.prox
        away = log_ratio(streams.new, anchor, streams.mask, o.log_ratio_limit)
        part = clipped_surrogate(away, streams.advantages, streams.mask, o)
        loss = part.loss
        sums = token_sums(streams, o.log_ratio_limit)
        if o.anchor == "prox":
            w = correction_weights(streams.prox, streams.behave, streams.mask, o.correction, o.log_ratio_limit)
            loss = loss * w.weight
            sums["correction/weight"], sums["correction/kept"] = w.weight.sum(), w.kept.sum()
        sums["clip_fraction"], sums["clip_fraction_dual"] = part.clipped.sum(), part.dual.sum()
        sums["prox_kl"] = -away.detach().sum()
        return LossTerms(loss=loss, sums=sums, peaks={"ratio/max": away.detach().exp().amax()})
