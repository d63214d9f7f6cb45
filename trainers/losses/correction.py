"""Weights ``rho = exp(prox - behave)`` for what the rollout engine or an older policy sampled differently.

Serves the correction of engine mismatch (truncated at 2, on at every depth) and the behave weight of decoupled losses.
The weight carries no gradient; rejection never changes a denominator (docs/losses.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from headrace.trainers.losses.loss import Survey, log_ratio, select

__all__ = ("Correction", "Weights", "correction_weights", "mean_weight", "rejected", "segments", "weight_survey")


class Correction(BaseModel):
    """How prox/behave ratios become weights.

    level: per token, one value per sequence, or one per segment, an unbroken run of trained tokens (a turn). action:
    ``clamp`` limits the weight to ``upper``, ``mask`` gives weight 0 beyond ``upper`` (or below ``lower``), ``off``
    gives 1 everywhere. metric: what is compared with the bounds; for all but the ratio the weight stays the token's.
    With x = log(prox / behave): k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x, k3_behave = exp(x) - 1 - x, which is the
    unbiased one of KL(behave, prox) on sampled tokens.
    reduce: how a sequence's tokens become one criterion. product: a sequence's weight is the product of its ratios
    instead of their geometric mean. normalize: divide by the mean over all tokens (sequences, at the level
    ``sequence``) of the update, on whatever rank they are.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Literal["token", "segment", "sequence"] = "token"
    action: Literal["clamp", "mask", "off"] = "clamp"
    metric: Literal["ratio", "k1", "k2", "k3", "k3_behave"] = "ratio"
    reduce: Literal["mean", "sum", "max"] = "mean"
    upper: float = Field(2.0, gt=0)
    lower: float = 0.0
    product: bool = False
    normalize: bool = False

    @model_validator(mode="after")
    def _some_range(self) -> Self:
        if not self.lower <= self.upper:
            raise ValueError(f"lower is {self.lower:g}, upper {self.upper:g}: no weight lies between them")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights [rows, tokens], 0 outside the mask; ``kept`` is 1 where a trained token keeps a weight above 0."""

    weight: Tensor
    kept: Tensor


def correction_weights(
    prox: Tensor, behave: Tensor, mask: Tensor, how: Correction, limit: float = 20.0, mean: Tensor | None = None
) -> Weights:
    """Weights for every token, without gradient; see ``Correction``.

    mean: the mean weight of the whole update, for ``normalize``; None takes that of these rows.
    """
    with torch.no_grad():
        found = _plain(prox, behave, mask, how, limit)
        if not how.normalize or how.action == "off":
            return found
        if mean is None:
            mean = mean_weight(_survey(found.weight, mask, how))
        return Weights(weight=found.weight / mean.clamp(min=1e-8), kept=found.kept)


def rejected(prox: Tensor, behave: Tensor, mask: Tensor, rules: Sequence[Correction], limit: float = 20.0) -> Tensor:
    """1.0 where every rule keeps a trained token, else 0.0; of a rule only what it masks counts, not its weight."""
    kept = mask.to(prox.dtype)
    for rule in rules:
        kept = kept * correction_weights(prox, behave, mask, rule.model_copy(update={"action": "mask"}), limit).kept
    return kept


def weight_survey(prox: Tensor, behave: Tensor, mask: Tensor, how: Correction, limit: float = 20.0) -> Survey:
    """Sum and count of the weights before ``normalize``, from which ``mean_weight`` makes the mean of an update."""
    with torch.no_grad():
        return _survey(_plain(prox, behave, mask, how, limit).weight, mask, how)


def mean_weight(survey: Survey) -> Tensor:
    """The mean weight of an update."""
    total: Tensor = survey["weight_sum"].sum() / survey["weight_count"].sum().clamp(min=1)
    return total


def _plain(prox: Tensor, behave: Tensor, mask: Tensor, how: Correction, limit: float) -> Weights:
    """Weights before ``normalize``."""
    away = log_ratio(prox, behave, mask, limit)
    ones = mask.to(away.dtype)
    if how.action == "off":
        return Weights(weight=ones, kept=ones)
    token = select(away.exp(), mask)
    weight, criterion = token, _measure(away, token, how)
    if how.level != "token":
        parts = segments(mask) if how.level == "segment" else torch.zeros_like(mask, dtype=torch.int64)
        weight, criterion = _by_part(away, token, criterion, mask, parts, how, limit)
    if how.action == "clamp":
        return Weights(weight=select(weight.clamp(how.lower or None, how.upper), mask), kept=ones)
    inside = (criterion <= how.upper) & (criterion >= how.lower if how.lower else torch.ones_like(mask))
    kept = select(inside.to(weight.dtype), mask)
    return Weights(weight=weight * kept, kept=kept)


def _survey(weight: Tensor, mask: Tensor, how: Correction) -> dict[str, Tensor]:
    if how.level == "sequence":
        weight, mask = weight.amax(-1), mask.any(-1)
    return {"weight_sum": weight.sum()[None], "weight_count": mask.sum().to(weight.dtype)[None]}


def _measure(away: Tensor, ratio: Tensor, how: Correction) -> Tensor:
    if how.metric == "ratio":
        return ratio
    if how.metric == "k1":
        return away
    if how.metric == "k2":
        return 0.5 * away * away
    if how.metric == "k3_behave":
        return ratio - 1 - away
    return torch.exp(-away) - 1 + away


def segments(mask: Tensor) -> Tensor:
    """The number, from 0, of the unbroken run of trained tokens that a token belongs to, int64 [rows, tokens].

    Tokens outside the mask have the number of a run beside them.
    """
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return ((mask & ~before).cumsum(-1) - 1).clamp(min=0)


def _by_part(
    away: Tensor, token: Tensor, criterion: Tensor, mask: Tensor, parts: Tensor, how: Correction, limit: float
) -> tuple[Tensor, Tensor]:
    """Weight and criterion of each part of a sequence, spread over its tokens."""
    lengths = _reduce(torch.ones_like(away), mask, parts, "sum").clamp(min=1)
    total = _reduce(away, mask, parts, "sum")
    if how.metric == "ratio":
        weight = (total.clamp(-limit, limit) if how.product else total / lengths).exp()
        reduced = _reduce(away, mask, parts, how.reduce).clamp(-limit, limit).exp()
    else:
        weight = token
        reduced = _reduce(criterion, mask, parts, how.reduce)
    return select(weight, mask), reduced


def _reduce(x: Tensor, mask: Tensor, parts: Tensor, reduce: Literal["mean", "sum", "max"]) -> Tensor:
    """Mean, sum or maximum of ``x`` over the trained tokens of each part, at every token of the part; 0 for none."""
    kind: Literal["sum", "amax"] = "amax" if reduce == "max" else "sum"
    given = torch.where(mask, x, torch.full((), -torch.inf, dtype=x.dtype, device=x.device)) if kind == "amax" else x
    given = given if kind == "amax" else select(x, mask)
    start = torch.full_like(x, -torch.inf) if kind == "amax" else torch.zeros_like(x)
    found = start.scatter_reduce(-1, parts, given, reduce=kind, include_self=True).gather(-1, parts)
    if reduce == "mean":
        counted = torch.zeros_like(x).scatter_reduce(-1, parts, mask.to(x.dtype), reduce="sum").gather(-1, parts)
        found = found / counted.clamp(min=1)
    return torch.nan_to_num(found, neginf=0.0)
