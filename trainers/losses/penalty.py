"""The KL penalty to a frozen reference that any loss may add, and its options."""

from pydantic import Field

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.losses.kl import KLEstimator, kl_per_token
from headrace.trainers.losses.loss import LossOptions, LossTerms, Streams, log_ratio

__all__ = ("PenaltyOptions", "penalized")


class PenaltyOptions(LossOptions):
    """kl_weight: beta of the penalty; 0 leaves the reference out. kl: the estimator.

    kl_unbiased: multiply the estimate by new / prox, so that its gradient is that of the divergence itself. kl_bound:
    clamp the estimate to plus and minus this, 0: only k3, to 10; a token beyond it has no gradient.
    """

    kl_weight: float = Field(0.0, ge=0)
    kl: KLEstimator = "k3"
    kl_unbiased: bool = False
    kl_bound: float = Field(0.0, ge=0)


def penalized(terms: LossTerms, streams: Streams, options: PenaltyOptions) -> LossTerms:
    """``terms`` with ``kl_weight * KL(new, ref)`` per token and the metric ``ref_kl``; unchanged without a weight."""
    if options.kl_weight <= 0:
        return terms
    if streams.ref is None:
        raise ConfigurationError("a loss with kl_weight needs reference log-probs, and the backend gave none")
    limit = options.log_ratio_limit
    kl = kl_per_token(streams.new, streams.ref, streams.mask, options.kl, limit, options.kl_bound)
    if options.kl_unbiased:
        kl = kl * log_ratio(streams.new, streams.prox, streams.mask, limit).exp()
    sums = {**terms.sums, "ref_kl": kl.detach().sum()}
    return LossTerms(loss=terms.loss + options.kl_weight * kl, sums=sums, peaks=terms.peaks, rows=terms.rows)
