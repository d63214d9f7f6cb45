"""What losses on one ratio share: the anchor of the ratio, the correction, and the metrics.

A subclass gives the surrogate per token; this class weights it by truncated prox / behave ratios where the ratio itself
does not carry the correction.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from headrace.trainers.losses.correction import Correction, correction_weights
from headrace.trainers.losses.loss import LossOptions, LossTerms, Streams, log_ratio, token_sums

__all__ = ("Anchored", "AnchoredOptions", "Surrogate")


class AnchoredOptions(LossOptions):
    """anchor: the ratio's denominator. correction: weights by prox / behave, truncated at 2; unused on ``behave``."""

    anchor: Literal["prox", "behave"] = "prox"
    correction: Correction = Correction()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """A loss per token, 0 outside the mask, and sums of its own figures."""

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)


class Anchored(ABC):
    """See ``Loss``; the ratio is new / prox, or new / behave with the anchor ``behave``."""

    Options: ClassVar[type[LossOptions]] = AnchoredOptions

    def __init__(self, options: AnchoredOptions) -> None:
        self.anchoring = options

    @property
    def corrects_staleness(self) -> bool:
        """True on the anchor ``behave`` and whenever the correction is on."""
        return self.anchoring.anchor == "behave" or self.anchoring.correction.action != "off"

    @property
    def needs_reference(self) -> bool:
        """False unless a subclass says otherwise."""
        return False

    def anchor(self, streams: Streams) -> Tensor:
        """The log-probs in the ratio's denominator."""
        return streams.behave if self.anchoring.anchor == "behave" else streams.prox

    @abstractmethod
    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """The loss per token from the log of the ratio, [sequences, tokens]."""

    def __call__(self, streams: Streams) -> LossTerms:
        """See ``Loss``."""
        o = self.anchoring
        away = log_ratio(streams.new, self.anchor(streams), streams.mask, o.log_ratio_limit)
        part = self.surrogate(away, streams)
        loss = part.loss
        sums = {**token_sums(streams, o.log_ratio_limit), **part.sums, "prox_kl": -away.detach().sum()}
        if o.anchor == "prox":
            w = correction_weights(streams.prox, streams.behave, streams.mask, o.correction, o.log_ratio_limit)
            loss = loss * w.weight
            sums |= {"correction/weight": w.weight.sum(), "correction/kept": w.kept.sum()}
        return LossTerms(loss=loss, sums=sums, peaks={"ratio/max": away.detach().exp().amax()})
