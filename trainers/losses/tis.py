"""Truncated importance sampling: the plain policy gradient, weighted by a ratio to what sampled, up to a cap."""

from typing import ClassVar, Self

from pydantic import model_validator
from torch import Tensor

from headrace.trainers.losses.anchored import AnchoredOptions, Surrogate
from headrace.trainers.losses.correction import Correction, correction_weights
from headrace.trainers.losses.loss import LossOptions, Streams
from headrace.trainers.losses.reinforce import Reinforce

__all__ = ("TIS", "TISOptions")


class TISOptions(AnchoredOptions):
    """correction: per token, up to 2; for one weight a sequence ``{level = "sequence", product = true}``.

    anchor: ``prox`` weighs by prox / behave, the same in all updates of a batch (verl); ``behave`` by new / behave, so
    that a token weighs less the further the policy has gone from what sampled it (ROLL Flash: C = 5 in the paper, 1 in
    its code).
    """

    correction: Correction = Correction(level="token", action="clamp", upper=2.0)

    @model_validator(mode="after")
    def _mean_is_of_the_batch(self) -> Self:
        if self.anchor == "behave" and self.correction.normalize:
            raise ValueError('correction.normalize needs anchor = "prox": weights by new / behave change in an update')
        return self


class TIS(Reinforce):
    """``-A log(new) min(rho, C)``, or ``min(product of rho, C)`` at the level ``sequence``; rho as ``anchor`` says."""

    Options: ClassVar[type[LossOptions]] = TISOptions

    @property
    def corrects_staleness(self) -> bool:
        """True whenever the correction acts."""
        return self.anchoring.correction.action != "off"

    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """See ``Anchored``."""
        part, o = super().surrogate(away, streams), self.anchoring
        if o.anchor == "prox":
            return part
        w = correction_weights(streams.new, streams.behave, streams.mask, o.correction, o.log_ratio_limit)
        clipped = ((away.detach() > 0) & (w.weight < away.detach().exp())) * streams.mask
        return Surrogate(loss=part.loss * w.weight, sums={"clip_fraction": clipped.to(away.dtype).sum()}, kept=w.kept)
