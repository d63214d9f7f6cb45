"""The loss of a critic: squared distance of a value to its return, clipped around the value before the update."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.trainers.losses.loss import select

__all__ = ("ValueTerms", "value_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTerms:
    """The loss per token, 0 outside the mask, and sums over trained tokens."""

    loss: Tensor
    sums: dict[str, Tensor]


def value_loss(new: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float) -> ValueTerms:
    """``max((v - R)^2, (clip(v, old +- clip) - R)^2) / 2`` per token, [sequences, tokens]; clip 0: no clip.

    The larger of both is taken, so that a value gets no credit for moving further than the clip in one batch.
    """
    v, goal, start = select(new, mask), select(returns, mask), select(old, mask)
    free = (v - goal) ** 2
    loss, clipped = free, torch.zeros_like(free)
    if clip:
        bound = (torch.maximum(torch.minimum(v, start + clip), start - clip) - goal) ** 2
        loss = torch.maximum(free, bound)
        clipped = (bound > free).to(free.dtype)
    with torch.no_grad():
        sums = {
            "critic/clip_fraction": select(clipped, mask).sum(), "critic/value": v.sum(), "critic/return": goal.sum(),
            "critic/error_squared": ((start - goal) ** 2).sum(), "critic/return_squared": (goal * goal).sum(),
        }  # fmt: skip
    return ValueTerms(loss=select(0.5 * loss, mask), sums=sums)
