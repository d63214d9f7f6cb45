"""M2PO: PPO on new / behave whose clip range follows from a bound on the second moment of the log ratios.

The bound is applied to the tokens of a micro-batch, so a batch of several micro-batches has a range for each.
"""

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from headrace.trainers.losses.anchored import Anchored, AnchoredOptions, Surrogate
from headrace.trainers.losses.clip import ClipOptions, clipped_surrogate
from headrace.trainers.losses.loss import LossOptions, Streams, select

__all__ = ("M2PO", "M2POOptions")


_INCLUSIVE = 1 - 1e-12
"""The official variant clips the token that sets the threshold as well."""


class M2POOptions(AnchoredOptions):
    """variant: how the threshold is found. budget: the bound. least_low, least_high: the range is never narrower
    (official). dual_clip: 0 leaves it out.
    """

    anchor: Literal["prox", "behave"] = "behave"
    variant: Literal["astraflow", "official"] = "astraflow"
    budget: float = 0.04
    least_low: float = 0.0
    least_high: float = 0.0
    dual_clip: float = 0.0


class M2PO(Anchored):
    """PPO with the range ``[e^-tau, e^tau]``, tau from the log ratios that go the way of their advantage.

    astraflow: the largest are dropped until the mean of the squares is below the budget, tau is the largest kept.
    official: tau is the largest for which the mean of the squares, each capped at tau^2, is within the budget.
    """

    Options: ClassVar[type[LossOptions]] = M2POOptions

    def __init__(self, options: M2POOptions) -> None:
        super().__init__(options)
        self.options = options

    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """See ``Anchored``."""
        o = self.options
        low, high = self._range(away.detach(), select(streams.advantages, streams.mask))
        clip = ClipOptions(clip_low=low, clip_high=high, dual_clip=o.dual_clip)
        part = clipped_surrogate(away, streams.advantages, streams.mask, clip)
        return Surrogate(loss=part.loss, sums={"clip_fraction": part.clipped.sum()})

    def _range(self, away: Tensor, gain: Tensor) -> tuple[float, float]:
        """Widths of the clip range below and above 1."""
        squares = (away * away)[((gain > 0) & (away > 0)) | ((gain < 0) & (away < 0))].sort().values
        n = squares.numel()
        if not n:
            return 0.95, 20.0
        ranks = torch.arange(1, n + 1, dtype=squares.dtype, device=squares.device)
        if self.options.variant == "astraflow":
            within = squares.cumsum(0) / ranks < self.options.budget
        else:
            within = (squares.cumsum(0) + (n - ranks) * squares) / n <= self.options.budget
        count = int(within.sum())
        tau = math.sqrt(float(squares[count - 1])) if count else 0.0
        if self.options.variant == "official":
            tau *= _INCLUSIVE
        low, high = 1 - math.exp(-tau), math.exp(tau) - 1
        return max(self.options.least_low, min(low, 0.95)), max(self.options.least_high, min(high, 20.0))
