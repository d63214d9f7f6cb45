"""M2PO: a bound on the second moment of the log ratios decides what is clipped or left out.

The bound is on all tokens of an update, on whatever rank and in whatever micro-batch they are: what it follows from is
collected by ``survey`` before the backward pass (docs/losses.md).
"""

from typing import ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from headrace.trainers.losses.anchored import Anchored, AnchoredOptions, Surrogate
from headrace.trainers.losses.clip import ClipOptions, DualClip, clipped_surrogate
from headrace.trainers.losses.loss import FAR, LossOptions, Streams, Survey, log_ratio, select
from headrace.trainers.losses.second_moment import ClipRange, clip_range, largest_kept

__all__ = ("M2PO", "M2POOptions")


class M2POOptions(AnchoredOptions):
    """variant: what the bound does. budget: the bound. least_low, least_high: the range is never narrower (official).
    dual_clip: 0 leaves it out. clip_low, clip_high: the fixed range of the variant ``areal``.
    """

    anchor: Literal["prox", "behave"] = "behave"
    variant: Literal["astraflow", "official", "areal"] = "astraflow"
    budget: float = Field(0.04, gt=0)
    least_low: float = Field(0.0, ge=0)
    least_high: float = Field(0.0, ge=0)
    dual_clip: DualClip = 0.0
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.2, ge=0)


class M2PO(Anchored):
    """PPO with the range ``[e^-tau, e^tau]``, tau from the log ratios that go the way of their advantage.

    astraflow: the largest are dropped until the mean of the squares is below the budget, tau is the largest kept; where
    nothing has to be dropped, nothing is clipped.
    official: tau is the largest for which the mean of the squares, each capped at tau^2, is within the budget.
    areal: no range; PPO on new / prox without the tokens whose (prox / behave) is so far off that the mean of the
    squares of all tokens would reach the budget.
    """

    Options: ClassVar[type[LossOptions]] = M2POOptions

    def __init__(self, options: M2POOptions) -> None:
        masks = options.variant == "areal"
        super().__init__(options.model_copy(update={"anchor": "prox"}) if masks else options)
        self.options = options
        self._squares: Tensor | None = None

    @property
    def surveys(self) -> bool:
        """Always: the bound is on a whole update."""
        return True

    def survey(self, streams: Streams) -> Survey:
        """Squares of the log ratios that the bound is on."""
        return {**super().survey(streams), "squares": self._measured(streams)}

    def fitted(self, survey: Survey) -> Self:
        """See ``Surveying``."""
        other = super().fitted(survey)
        other._squares = survey["squares"]
        return other

    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """See ``Anchored``."""
        o = self.options
        squares = self._measured(streams) if self._squares is None else self._squares
        if o.variant == "areal":
            fixed = ClipOptions(clip_low=o.clip_low, clip_high=o.clip_high, dual_clip=o.dual_clip)
            part = clipped_surrogate(away, streams.advantages, streams.mask, fixed)
            limit = largest_kept(squares, o.budget)
            kept = select((self._apart(streams) ** 2 <= limit).to(away.dtype), streams.mask)
            return Surrogate(loss=part.loss, sums=part.sums(), kept=kept)
        found = self.range_of(squares)
        clip = ClipOptions(clip_low=found.low, clip_high=found.high, dual_clip=o.dual_clip)
        part = clipped_surrogate(away, streams.advantages, streams.mask, clip)
        ones = streams.mask.sum().to(away.dtype)
        widths = {"m2po/clip_low": ones * found.low, "m2po/clip_high": ones * found.high}
        return Surrogate(loss=part.loss, sums={**part.sums(), **widths})

    def range_of(self, squares: Tensor) -> ClipRange:
        """Widths of the clip range below and above 1 that the squares of an update give."""
        o = self.options
        found = clip_range(squares, o.budget, capped=o.variant == "official")
        return ClipRange(low=max(o.least_low, found.low), high=max(o.least_high, found.high))

    def _apart(self, streams: Streams) -> Tensor:
        """Log ratios of prox to behave, without gradient."""
        return log_ratio(streams.prox, streams.behave, streams.mask, FAR).detach()

    def _measured(self, streams: Streams) -> Tensor:
        """Squares of these rows that the bound is on, one-dimensional."""
        if self.options.variant == "areal":
            return (self._apart(streams) ** 2)[streams.mask]
        limit = self.options.log_ratio_limit
        away = log_ratio(streams.new.detach(), self.anchor(streams), streams.mask, limit)
        gain = select(streams.advantages, streams.mask)
        found: Tensor = (away * away)[((gain > 0) & (away > 0)) | ((gain < 0) & (away < 0))]
        return found
