"""Log-probs and entropies of chosen tokens straight from hidden states, without ever holding the full logits.

In go hidden states, the vocabulary projection and the chosen tokens; out come one log-prob and one entropy a token,
both differentiable. The projection runs over slices of the vocabulary with a running log-sum-exp; backward makes the
slices again, except those that ``keep_bytes`` had room for, and writes each slice of the weight's gradient once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ("HeadShape", "token_logprobs")

_SLICE_BYTES = 32 << 20
"""Working set of one slice of logits: large enough for full speed of the product, small beside the model."""
_LEAST_WIDTH = 256
_FAR = -1e4
"""Logits this far below the largest count as -inf: their exponential is 0 either way, and 0 * inf is no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """What a model does to its logits after the projection, and how much memory they may take.

    softcap: logits become ``softcap * tanh(logits / softcap)`` (0: no cap). keep_bytes: slices of logits up to this
    many bytes are kept for backward, the others are made again. slice_bytes: size of one slice.
    """

    softcap: float = 0.0
    keep_bytes: int = 1 << 30
    slice_bytes: int = _SLICE_BYTES

    def slices(self, tokens: int, vocabulary: int) -> list[slice]:
        """Ranges of the vocabulary that are worked on one after the other."""
        width = min(vocabulary, max(_LEAST_WIDTH, self.slice_bytes // (4 * max(1, tokens))))
        return [slice(at, min(at + width, vocabulary)) for at in range(0, vocabulary, width)]


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    shape: HeadShape | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy (nats, float32 [n]) of ``targets`` under ``softmax(head(hidden) * scale / temperature)``.

    hidden [n, h] and weight [vocabulary, h] in the dtype of the product; bias [vocabulary] or None; targets int64 [n];
    temperature float32 [n], applied after the cap; scale before it. Sums are float32. Differentiable once in hidden,
    weight and bias.
    """
    shape = shape or HeadShape()
    if not torch.is_grad_enabled():
        shape = HeadShape(softcap=shape.softcap, keep_bytes=0, slice_bytes=shape.slice_bytes)
    inverse = temperature.reciprocal()
    out: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, inverse, scale, shape
    )
    return out


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse: Tensor,
        scale: float,
        shape: HeadShape,
    ) -> tuple[Tensor, Tensor]:
        running, chosen = _Running(inverse), torch.zeros_like(inverse)
        kept: list[tuple[Tensor, Tensor | None]] = []
        room = shape.keep_bytes
        for at in shape.slices(len(targets), weight.shape[0]):
            z, slope = _logits(hidden, weight, bias, at, inverse, scale, shape.softcap)
            rows = _rows(targets, at)
            chosen[rows] = z[rows, targets[rows] - at.start]
            running.add(z)
            room -= z.nbytes * (1 if slope is None else 2)
            if room >= 0:
                kept.append((z, slope))
        log_sum = running.top + running.total.log()
        entropy = running.total.log() - running.weighted / running.total
        ctx.scale, ctx.shape, ctx.kept = scale, shape, kept
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, inverse, log_sum, entropy)
        return chosen - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, inverse, log_sum, entropy = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, []
        wants = ctx.needs_input_grad
        by_hidden = torch.zeros(hidden.shape, device=hidden.device) if wants[0] else None
        by_weight = torch.empty_like(weight) if wants[1] else None
        by_bias = torch.empty_like(bias) if bias is not None and wants[2] else None
        for number, at in enumerate(ctx.shape.slices(len(targets), weight.shape[0])):
            if number < len(kept):
                z, slope = kept[number]
                kept[number] = (z[:0], None)
            else:
                z, slope = _logits(hidden, weight, bias, at, inverse, ctx.scale, ctx.shape.softcap)
            d = _by_logits(z, _rows(targets, at), targets, at, log_sum, entropy, by_logprob, by_entropy)
            d *= (inverse * ctx.scale)[:, None]
            if slope is not None:
                d *= slope
            if by_bias is not None:
                by_bias[at] = d.sum(0)
            d = d.to(hidden.dtype)
            if by_hidden is not None:
                if hidden.dtype == torch.float32:
                    by_hidden.addmm_(d, weight[at])
                else:
                    by_hidden += torch.mm(d, weight[at])
            if by_weight is not None:
                torch.mm(d.t(), hidden, out=by_weight[at])
        return (None if by_hidden is None else by_hidden.to(hidden.dtype)), by_weight, by_bias, None, None, None, None


def _rows(targets: Tensor, at: slice) -> Tensor:
    """Indices of the tokens whose target lies in a slice of the vocabulary."""
    rows: Tensor = ((targets >= at.start) & (targets < at.stop)).nonzero()
    return rows[:, 0]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, at: slice, inverse: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """One slice of the final logits, float32 [n, width], and the derivative of the cap where there is one."""
    z: Tensor = torch.mm(hidden, weight[at].t()).float()
    if bias is not None:
        z += bias[at].float()
    if not softcap:
        return z.mul_((inverse * scale)[:, None]), None
    bent = z.mul_(scale / softcap).tanh_()
    slope = 1 - bent * bent
    return bent.mul_((inverse * softcap)[:, None]), slope


def _by_logits(
    z: Tensor,
    rows: Tensor,
    targets: Tensor,
    at: slice,
    log_sum: Tensor,
    entropy: Tensor,
    by_logprob: Tensor | None,
    by_entropy: Tensor | None,
) -> Tensor:
    """The gradient by one slice of the final logits; takes the place of ``z``."""
    z.sub_(log_sum[:, None])
    if by_entropy is not None:
        pull = (z.clamp(min=_FAR) + entropy[:, None]).mul_(by_entropy[:, None])
        if by_logprob is not None:
            pull += by_logprob[:, None]
        d = z.exp_().mul_(pull.neg_())
    else:
        assert by_logprob is not None, "backward runs for one of the two outputs"
        d = z.exp_().mul_(-by_logprob[:, None])
    if by_logprob is not None:
        d[rows, targets[rows] - at.start] += by_logprob[rows]
    out: Tensor = d
    return out


class _Running:
    """Per token the largest logit so far, and relative to it the sums of exponentials and of those times logits."""

    def __init__(self, like: Tensor) -> None:
        self.top = torch.full_like(like, torch.finfo(like.dtype).min)
        self.total, self.weighted = torch.zeros_like(like), torch.zeros_like(like)

    def add(self, z: Tensor) -> None:
        """Take in a slice of logits [n, width]."""
        top = torch.maximum(self.top, z.amax(1))
        moved = self.top - top
        shrink = moved.exp()
        away = torch.sub(z, top[:, None]).clamp_(min=_FAR)
        e = away.exp()
        self.weighted = shrink * (self.weighted + self.total * moved) + torch.linalg.vecdot(e, away)
        self.total = shrink * self.total + e.sum(1)
        self.top = top
