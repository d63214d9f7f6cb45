"""The clipped surrogate of PPO with its dual clip, shared by every loss that clips a ratio (docs/losses.md)."""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from headrace.trainers.losses.loss import LossOptions, select

__all__ = ("ClipOptions", "Clipped", "DualClip", "clipped_surrogate")


def _off_or_above_one(factor: float) -> float:
    if factor == 0 or factor > 1:
        return factor
    raise ValueError("a dual clip is a factor above 1, or 0 for none: below 1 no token with A < 0 has a gradient")


DualClip = Annotated[float, AfterValidator(_off_or_above_one)]
"""The dual clip's factor, 0 to switch it off."""


class ClipOptions(LossOptions):
    """Clip range ``[1 - clip_low, 1 + clip_high]`` and the dual clip's factor, 0 to switch it off."""

    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: DualClip = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """The surrogate per token and, as 0/1 floats, where the clip and where the dual clip took hold."""

    loss: Tensor
    clipped: Tensor
    dual: Tensor

    def sums(self) -> dict[str, Tensor]:
        """The metrics of a clip: counts of tokens where it, and where the dual clip, takes the gradient away."""
        return {"clip_fraction": self.clipped.sum(), "clip_fraction_dual": self.dual.sum()}


def clipped_surrogate(away: Tensor, advantages: Tensor, mask: Tensor, options: ClipOptions) -> Clipped:
    """``max(-A r, -A clip(r))``, and for A < 0 at most ``-c A``; ``away`` is the log of the ratio r, [rows, tokens]."""
    ratio = away.exp()
    gain = select(advantages, mask)
    free = -gain * ratio
    bound = -gain * ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = torch.maximum(free, bound)
    clipped = select((bound > free).to(loss.dtype), mask)
    dual = torch.zeros_like(clipped)
    if options.dual_clip:
        cap = -gain * options.dual_clip
        over = (gain < 0) & (loss > cap)
        dual = select(over.to(loss.dtype), mask)
        loss = torch.where(over, cap, loss)
    return Clipped(loss=select(loss, mask), clipped=clipped, dual=dual)
