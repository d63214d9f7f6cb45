"""Sequences side by side in one row, without padding: where each begins, and how attention works on them.

Goes in: the lengths of a micro-batch's sequences; comes out: position ids, and a plan for attention that keeps each
sequence to itself. On GPUs in half precision torch's variable-length flash attention runs; elsewhere sequences of
similar length are padded together inside attention alone, every other layer sees real tokens only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headrace.trainers.backends.sequence_parallel import SequenceGroup

__all__ = ("IMPLEMENTATION", "Packing", "packed_attention", "register")

IMPLEMENTATION = "headrace_packed"
"""The name under which transformers finds this attention."""

_STRETCH, _SLACK = 1.25, 8
"""A bucket takes sequences up to this many times its shortest and so many tokens more."""


_FLASH_SIZE = 256
"""Largest head that flash attention takes."""
_CHANGES = ("position_bias", "head_mask", "attention_bias")
"""Arguments by which transformers models change attention in ways that are not handled here."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Sequences that attention pads to a common length. index int64 [rows * width]: tokens, padding repeats the first
    token of its row; real int64: those of the padded places that hold a token.
    """

    rows: int
    width: int
    index: Tensor
    real: Tensor


@dataclass(slots=True)
class Packing:
    """The sequences of one packed row; ``lengths`` are positive. group: ranks that share the row (Ulysses)."""

    lengths: Sequence[int]
    device: torch.device
    group: SequenceGroup | None = None
    _buckets: list[_Bucket] = field(default_factory=list)
    _order: Tensor | None = None
    _cumulative: Tensor | None = None
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Length of the row."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths)

    def positions(self) -> Tensor:
        """Position ids int64 [1, tokens]: each sequence counts from 0."""
        return torch.cat([torch.arange(n, device=self.device) for n in self.lengths])[None]

    def cumulative(self) -> Tensor:
        """Where sequences begin, and the end: int32 [sequences + 1]."""
        if self._cumulative is None:
            self._cumulative = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)
        return self._cumulative

    def buckets(self) -> tuple[list[_Bucket], Tensor]:
        """The plan for padded attention, and for each token its place in the buckets' real tokens one after another."""
        if self._order is None:
            self._plan()
        assert self._order is not None
        return self._buckets, self._order

    def _plan(self) -> None:
        starts = [0, *accumulate(self.lengths)]
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i])
        parts: list[list[int]] = []
        for i in order:
            if not parts or self.lengths[i] > _STRETCH * self.lengths[parts[-1][0]] + _SLACK:
                parts.append([])
            parts[-1].append(i)
        places: list[Tensor] = []
        for part in parts:
            sizes = torch.tensor([self.lengths[i] for i in part])
            begin = torch.tensor([starts[i] for i in part])
            width = int(sizes.max())
            at = torch.arange(width)
            here = at < sizes[:, None]
            index = (begin[:, None] + torch.where(here, at, 0)).flatten()
            real = here.flatten().nonzero()[:, 0]
            places.append(index[real])
            self._buckets.append(_Bucket(len(part), width, index.to(self.device), real.to(self.device)))
        self._order = torch.cat(places).argsort().to(self.device)

    def window_mask(self, width: int, window: int) -> Tensor:
        """True where a token may look: itself and the ``window - 1`` before it; bool [width, width]."""
        if (width, window) not in self._masks:
            at = torch.arange(width, device=self.device)
            away = at[:, None] - at
            self._masks[width, window] = (away >= 0) & (away < window)
        return self._masks[width, window]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence; the form that transformers calls.

    query [1, heads, tokens, size], key and value [1, key heads, tokens, size]; gives [1, tokens, heads, size]. softcap:
    bound of attention logits. s_aux [heads]: logits of sinks, which take part of the attention and give nothing. Under
    sequence parallelism tokens are this rank's; heads are exchanged for tokens before and back after. Raises
    NotImplementedError for a kind of attention that this is not.
    """
    _check_kind(module, sliding_window, more)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if packing.group is not None:
        q, k, v = packing.group.heads_for_tokens(q, k, v)
    half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    plain = softcap is None and s_aux is None
    if half and plain and q.shape[-1] == v.shape[-1] <= _FLASH_SIZE:
        out = _flash(q, k, v, packing, scaling, sliding_window or 0)
    else:
        sinks = s_aux if s_aux is None or packing.group is None else s_aux.chunk(packing.group.size)[packing.group.rank]
        out = _bucketed(q, k, v, packing, scaling, sliding_window or 0, softcap, sinks)
    if packing.group is not None:
        out = packing.group.tokens_for_heads(out)
    return out[None], None


def _check_kind(module: torch.nn.Module, window: int | None, more: dict[str, Any]) -> None:
    """Refuse what changes attention and is not handled: a wrong result would only show on long sequences."""
    known = [name for name in _CHANGES if more.get(name) is not None]
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        layer: Any = module.layer_idx
        slides = kinds[layer] == "sliding_attention"
    else:
        slides = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
    if slides and window is None:
        known.append("a sliding window that it does not pass on")
    if known:
        raise NotImplementedError(f"attention with {', '.join(known)}")


def _flash(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int) -> Tensor:
    """q [tokens, heads, size], k and v [tokens, key heads, size]."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = packing.cumulative(), packing.longest
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        starts,
        starts,
        longest,
        longest,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def _bucketed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    scaling: float | None,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    buckets, order = packing.buckets()
    outs = []
    for bucket in buckets:
        a, b, c = (x[bucket.index].view(bucket.rows, bucket.width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        masked = bool(window) and window < bucket.width
        if softcap is None and sinks is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                a,
                b,
                c,
                attn_mask=packing.window_mask(bucket.width, window) if masked else None,
                is_causal=not masked,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            seen = packing.window_mask(bucket.width, window if masked else bucket.width)
            out = _written_out(a, b, c, seen, scaling or q.shape[-1] ** -0.5, softcap, sinks)
        outs.append(out.transpose(1, 2).reshape(-1, q.shape[1], v.shape[2])[bucket.real])
    return torch.cat(outs)[order]


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention step by step, [rows, heads, width, size], with what fused attention does not have."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = (q @ k.transpose(2, 3) * scaling).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    return logits.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


def register() -> None:
    """Make the attention known to transformers under ``IMPLEMENTATION``; it builds no mask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
