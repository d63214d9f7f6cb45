"""Estimators of the KL divergence to a reference policy, per token (docs/losses.md)."""

from typing import Literal

import torch
from torch import Tensor

from headrace.trainers.losses.loss import FAR, log_ratio

__all__ = ("KLEstimator", "kl_per_token")

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]


def kl_per_token(
    new: Tensor, ref: Tensor, mask: Tensor, estimator: KLEstimator, limit: float = 20.0, bound: float = 0.0
) -> Tensor:
    """k1 = l - f, k2 = (l - f)^2 / 2, k3 = exp(f - l) - 1 - (f - l) clamped to 10; l new, f ref; 0 outside the mask.

    ``k1+`` and ``k3+`` have the value of k1 and k3 and the gradient of k2, which is that of the divergence on tokens
    that the policy itself sampled. The input of k3 is clamped as well as its output, so the gradient is finite wherever
    the value is. bound: clamp every estimator's value to plus and minus this; 0 leaves it out.
    """
    found = _estimate(new, ref, mask, estimator, limit)
    return found.clamp(-bound, bound) if bound else found


def _estimate(new: Tensor, ref: Tensor, mask: Tensor, estimator: KLEstimator, limit: float) -> Tensor:
    away = log_ratio(new, ref, mask, FAR)
    if estimator == "k1+":
        return _straight_through(away, away)
    if estimator == "k3+":
        return _straight_through(away, _k3(away, limit))
    if estimator == "k1":
        return away
    if estimator == "abs":
        return away.abs()
    if estimator == "k2":
        return 0.5 * away * away
    return _k3(away, limit)


def _k3(away: Tensor, limit: float) -> Tensor:
    away = away.clamp(-limit, limit)
    return (torch.exp(-away) - 1 + away).clamp(-10, 10)


def _straight_through(away: Tensor, value: Tensor) -> Tensor:
    """``value`` with the gradient of k2."""
    slope = 0.5 * away * away
    return slope - slope.detach() + value.detach()
