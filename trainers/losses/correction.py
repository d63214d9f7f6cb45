"""Weights ``rho = exp(prox - behave)`` for what the rollout engine or an older policy sampled differently.

Serves the correction of engine mismatch (truncated at 2, on at every depth) and the behave weight of decoupled losses.
The weight carries no gradient; rejection never changes a denominator (docs/losses.md).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from headrace.trainers.losses.loss import log_ratio, select

__all__ = ("Correction", "Weights", "correction_weights")


class Correction(BaseModel):
    """How prox/behave ratios become weights.

    level: per token, or one value per sequence. action: ``clamp`` limits the weight to ``upper``, ``mask`` gives weight
    0 beyond ``upper`` (or below ``lower``), ``off`` gives 1 everywhere. metric: what is compared with the bounds; for
    k1, k2, k3 the weight stays the token's ratio. reduce: how a sequence's tokens become one criterion. product: a
    sequence's weight is the product of its ratios instead of their geometric mean. normalize: divide by the mean
    of the micro-batch, so that the result depends on how the batch is packed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Literal["token", "sequence"] = "token"
    action: Literal["clamp", "mask", "off"] = "clamp"
    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    reduce: Literal["mean", "sum", "max"] = "mean"
    upper: float = 2.0
    lower: float = 0.0
    product: bool = False
    normalize: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights [rows, tokens], 0 outside the mask; ``kept`` is 1 where a trained token keeps a weight above 0."""

    weight: Tensor
    kept: Tensor


def correction_weights(prox: Tensor, behave: Tensor, mask: Tensor, how: Correction, limit: float = 20.0) -> Weights:
    """Weights for every token, without gradient; see ``Correction``."""
    with torch.no_grad():
        away = log_ratio(prox, behave, mask, limit)
        ones = mask.to(away.dtype)
        if how.action == "off":
            return Weights(weight=ones, kept=ones)
        token = select(away.exp(), mask)
        weight, criterion = token, _measure(away, token, how)
        if how.level == "sequence":
            weight, criterion = _by_sequence(away, token, criterion, mask, how, limit)
        if how.action == "clamp":
            weight, kept = select(weight.clamp(how.lower or None, how.upper), mask), ones
        else:
            inside = (criterion <= how.upper) & (criterion >= how.lower if how.lower else torch.ones_like(mask))
            kept = select(inside.to(weight.dtype), mask)
            weight = weight * kept
        if how.normalize:
            weight = weight / _mean_weight(weight, ones, how).clamp(min=1e-8)
        return Weights(weight=weight, kept=kept)


def _mean_weight(weight: Tensor, ones: Tensor, how: Correction) -> Tensor:
    """The mean over tokens, or over sequences where a sequence has one weight."""
    if how.level == "token":
        return weight.sum() / ones.sum().clamp(min=1)
    rows = ones.amax(-1)
    return weight.amax(-1).sum() / rows.sum().clamp(min=1)


def _measure(away: Tensor, ratio: Tensor, how: Correction) -> Tensor:
    if how.metric == "ratio":
        return ratio
    if how.metric == "k1":
        return away
    if how.metric == "k2":
        return 0.5 * away * away
    return torch.exp(-away) - 1 + away


def _by_sequence(
    away: Tensor, token: Tensor, criterion: Tensor, mask: Tensor, how: Correction, limit: float
) -> tuple[Tensor, Tensor]:
    """Weight and criterion of each sequence, spread over its tokens."""
    lengths = mask.sum(-1, keepdim=True).clamp(min=1).to(away.dtype)
    total = away.sum(-1, keepdim=True)
    if how.metric == "ratio":
        weight = (total.clamp(-limit, limit) if how.product else total / lengths).exp()
        reduced = _reduce(away, mask, lengths, how).clamp(-limit, limit).exp()
    else:
        weight = token
        reduced = _reduce(criterion, mask, lengths, how)
    return select(weight.expand_as(away), mask), reduced.expand_as(away)


def _reduce(x: Tensor, mask: Tensor, lengths: Tensor, how: Correction) -> Tensor:
    if how.reduce == "max":
        lowest = torch.where(mask, x, torch.full((), -torch.inf, dtype=x.dtype, device=x.device))
        return torch.nan_to_num(lowest.amax(-1, keepdim=True), neginf=0.0)
    total = select(x, mask).sum(-1, keepdim=True)
    return total if how.reduce == "sum" else total / lengths
