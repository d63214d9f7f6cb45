"""Thresholds from a bound on the mean of squared log ratios, for M2PO.

In: the squares of an update, in any order; out: the range of the clip, or the largest square that is kept. Equal
squares are kept or dropped together, so the order cannot matter.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ("ClipRange", "clip_range", "largest_kept")

_INCLUSIVE = 1 - 1e-12
"""The rule that caps clips the token that sets the threshold as well."""
_WIDEST_LOW, _WIDEST_HIGH = 0.95, 20.0


@dataclass(frozen=True, slots=True)
class ClipRange:
    """Widths of a clip range below and above 1."""

    low: float
    high: float


def clip_range(squares: Tensor, budget: float, *, capped: bool) -> ClipRange:
    """The range [e^-tau, e^tau], at most [0.05, 21], for the squares (one-dimensional) of violating tokens.

    capped: tau is the largest for which the mean of ``min(square, tau^2)`` is within the budget. Else tau is the
    largest log ratio left when the largest are dropped until the mean is below the budget, but for one; the widest
    range when nothing has to be dropped.
    """
    count, ordered = _within(squares, budget, capped=capped)
    if not len(ordered) or (not capped and count == len(ordered)):
        return ClipRange(_WIDEST_LOW, _WIDEST_HIGH)
    count = count if capped else max(1, count)
    tau = math.sqrt(float(ordered[count - 1])) if count else 0.0
    tau = tau * _INCLUSIVE if capped else tau
    return ClipRange(min(1 - math.exp(-tau), _WIDEST_LOW), min(math.exp(tau) - 1, _WIDEST_HIGH))


def largest_kept(squares: Tensor, budget: float) -> float:
    """The largest square left when the largest are dropped until the mean is below the budget; -1 when none is."""
    count, ordered = _within(squares, budget, capped=False)
    return float(ordered[count - 1]) if count else -1.0


def _within(squares: Tensor, budget: float, *, capped: bool) -> tuple[int, Tensor]:
    """How many of the smallest squares the budget allows, and all of them in order."""
    ordered = squares.sort().values
    n = ordered.numel()
    ranks = torch.arange(1, n + 1, dtype=ordered.dtype, device=ordered.device)
    total = ordered.cumsum(0, dtype=torch.float64)
    within = (total + (n - ranks) * ordered) / max(1, n) <= budget if capped else total / ranks < budget
    return int(within.sum()), ordered
