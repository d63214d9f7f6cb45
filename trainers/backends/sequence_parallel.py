"""Ulysses sequence parallelism: ranks share the tokens of a packed row, and within attention the heads.

Goes in: a process group; comes out: differentiable exchanges. Before attention each rank gives away tokens of most
heads for all tokens of its own heads, after it the reverse, so that any attention runs on whole sequences. Each rank
holds ``1 / size`` of the row's tokens in every other layer.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ("SequenceGroup",)


class SequenceGroup:
    """``size`` ranks of which this one is ``rank``; ``group`` is their process group. Calls are collective."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank, self.size, self.group = rank, size, group

    def padding(self, tokens: int) -> int:
        """Tokens that a row lacks to be shared evenly."""
        return -tokens % self.size

    def part(self, tokens: int) -> slice:
        """This rank's run of a row whose length is a multiple of ``size``."""
        each = tokens // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def heads_for_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens / size, heads, head size] to [tokens, heads / size, head size]; key heads are repeated where there
        are fewer than ranks.
        """
        out = []
        for x in (q, k, v):
            short = self.size // x.shape[1] if x.shape[1] < self.size else 1
            whole = x.repeat_interleave(short, 1) if short > 1 else x
            out.append(self._exchange(whole, 1, 0))
        return out[0], out[1], out[2]

    def tokens_for_heads(self, x: Tensor) -> Tensor:
        """[tokens, heads / size, head size] to [tokens / size, heads, head size]."""
        return self._exchange(x, 0, 1)

    def shared(self, x: Tensor) -> Tensor:
        """The sum over ranks of tensors that are 0 where another rank's part is; every rank takes its own gradient."""
        out: Tensor = _Shared.apply(x, self.group)  # type: ignore[no-untyped-call]
        return out

    def _exchange(self, x: Tensor, cut: int, joined: int) -> Tensor:
        out: Tensor = _Exchange.apply(x, self, cut, joined)  # type: ignore[no-untyped-call]
        return out

    def exchange(self, x: Tensor, cut: int, joined: int) -> Tensor:
        """Cut along one dimension, send each rank its part, and join what comes along another."""
        send = [part.contiguous() for part in x.chunk(self.size, cut)]
        come = [torch.empty_like(send[0]) for _ in send]
        dist.all_to_all(come, send, group=self.group)
        return torch.cat(come, joined)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, cut: int, joined: int) -> Tensor:
        ctx.back = (group, joined, cut)
        return group.exchange(x, cut, joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        group, cut, joined = ctx.back
        return group.exchange(gradient, cut, joined), None, None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None
