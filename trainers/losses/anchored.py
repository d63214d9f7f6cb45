"""What losses on one ratio share: the anchor of the ratio, correction, rejection, penalty, and the metrics.

A subclass gives the surrogate per token; this class weights it by truncated prox / behave ratios where the ratio itself
does not carry the correction.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from headrace.trainers.losses.correction import (
    Correction,
    correction_weights,
    mean_weight,
    rejected,
    weight_survey,
)
from headrace.trainers.losses.divergence import Divergence, sequence_mask
from headrace.trainers.losses.loss import LossOptions, LossTerms, Streams, Survey, log_ratio, token_sums
from headrace.trainers.losses.penalty import PenaltyOptions, penalized

__all__ = ("Anchored", "AnchoredOptions", "Surrogate")


class AnchoredOptions(PenaltyOptions):
    """anchor: the ratio's denominator. correction: weights by prox / behave, truncated at 2; unused on ``behave``.

    reject: rules on prox / behave by which tokens or sequences are left out, whatever the anchor. sequence_mask: leave
    out sequences with a negative advantage from which the policy has moved away further than this (mean of
    log(anchor / new)); 0 switches it off.
    """

    anchor: Literal["prox", "behave"] = "prox"
    correction: Correction = Correction()
    reject: tuple[Correction, ...] = ()
    sequence_mask: float = Field(0.0, ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """A loss per token, 0 outside the mask, and sums of its own figures.

    kept: 1.0 on trained tokens that the loss itself does not leave out; None where it leaves out none.
    """

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Tensor | None = None


class Anchored(ABC):
    """See ``Loss`` and ``Surveying``; the ratio is new / prox, or new / behave with the anchor ``behave``."""

    Options: ClassVar[type[LossOptions]] = AnchoredOptions

    def __init__(self, options: AnchoredOptions) -> None:
        self.anchoring = options
        self._mean: Tensor | None = None

    @property
    def corrects_staleness(self) -> bool:
        """True on the anchor ``behave`` and whenever the correction is on."""
        return self.anchoring.anchor == "behave" or self.anchoring.correction.action != "off"

    @property
    def needs_reference(self) -> bool:
        """True with a penalty."""
        return self.anchoring.kl_weight > 0

    @property
    def surveys(self) -> bool:
        """True when weights are divided by their mean over the update."""
        return self._weighs and self.anchoring.correction.normalize

    def survey(self, streams: Streams) -> Survey:
        """See ``Surveying``."""
        o = self.anchoring
        if not (self._weighs and o.correction.normalize):
            return {}
        return weight_survey(streams.prox, streams.behave, streams.mask, o.correction, o.log_ratio_limit)

    def fitted(self, survey: Survey) -> Self:
        """See ``Surveying``."""
        other = copy(self)
        if "weight_sum" in survey:
            other._mean = mean_weight(survey)
        return other

    @property
    def _weighs(self) -> bool:
        return self.anchoring.anchor == "prox" and self.anchoring.correction.action != "off"

    def anchor(self, streams: Streams) -> Tensor:
        """The log-probs in the ratio's denominator."""
        return streams.behave if self.anchoring.anchor == "behave" else streams.prox

    @abstractmethod
    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """The loss per token from the log of the ratio, [sequences, tokens]."""

    def __call__(self, streams: Streams) -> LossTerms:
        """See ``Loss``."""
        o, mask = self.anchoring, streams.mask
        away = log_ratio(streams.new, self.anchor(streams), mask, o.log_ratio_limit)
        part = self.surrogate(away, streams)
        kept = mask.to(away.dtype) if part.kept is None else part.kept
        kept = kept * rejected(streams.prox, streams.behave, mask, o.reject, o.log_ratio_limit)
        if o.sequence_mask:
            kept = kept * sequence_mask(away.detach(), streams.advantages, mask, o.sequence_mask)
        weight = kept
        sums = {"clip_fraction": torch.zeros_like(kept).sum(), **token_sums(streams, o.log_ratio_limit), **part.sums}
        sums["prox_kl"] = -away.detach().sum()
        peaks = {"ratio/max": away.detach().exp().amax()}
        if o.anchor == "prox":
            limit = o.log_ratio_limit
            w = correction_weights(streams.prox, streams.behave, mask, o.correction, limit, self._mean)
            weight, kept = weight * w.weight, kept * w.kept
            sums["correction/weight"], peaks["correction/weight_max"] = w.weight.sum(), w.weight.amax()
        sums["kept_fraction"] = kept.sum()
        gap = Divergence.of(streams, o.log_ratio_limit)
        terms = LossTerms(
            loss=part.loss * weight, sums={**sums, **gap.sums}, peaks={**peaks, **gap.peaks}, rows=gap.rows
        )
        return penalized(terms, streams, o)
