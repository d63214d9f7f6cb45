"""REINFORCE: the plain policy gradient, weighted by a truncated prox / behave ratio (docs/losses.md)."""

from typing import ClassVar

from headrace.trainers.losses.correction import Correction, correction_weights
from headrace.trainers.losses.loss import LossOptions, LossTerms, Streams, finite_logprobs, select, token_sums

__all__ = ("Reinforce", "ReinforceOptions")


class ReinforceOptions(LossOptions):
    """correction: weights by prox / behave, truncated at 2."""

    correction: Correction = Correction()


class Reinforce:
    """``-A log(new) * w``."""

    Options: ClassVar[type[LossOptions]] = ReinforceOptions

    def __init__(self, options: ReinforceOptions) -> None:
        self.options = options

    @property
    def corrects_staleness(self) -> bool:
        """True whenever the correction is on."""
        return self.options.correction.action != "off"

    @property
    def needs_reference(self) -> bool:
        """REINFORCE needs none."""
        return False

    def __call__(self, streams: Streams) -> LossTerms:
        """See ``Loss``."""
        o = self.options
        w = correction_weights(streams.prox, streams.behave, streams.mask, o.correction, o.log_ratio_limit)
        gain = select(streams.advantages, streams.mask)
        loss = -gain * finite_logprobs(streams.new, streams.mask) * w.weight
        sums = token_sums(streams, o.log_ratio_limit)
        sums["correction/weight"], sums["correction/kept"] = w.weight.sum(), w.kept.sum()
        return LossTerms(loss=loss, sums=sums)
