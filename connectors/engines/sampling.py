"""Choosing the next token of every row at once: temperature, top-k, top-p, and numbers that depend on the row alone.

Goes in: logits of a batch; comes out: a token and its log-prob for each row. A row's random numbers come from its seed
and the index of the token, so a sequence is the same whatever batch it runs in.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = ("choose", "uniforms")

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.int64], counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, counter), with 32 random bits."""
    start = _mixed(seeds.astype(np.uint64) + _GOLDEN)
    bits = _mixed(start + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(32)).astype(np.float64) / 2.0**32


def choose(
    logits: "torch.Tensor",
    temperature: npt.NDArray[np.float32],
    top_p: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int32],
    u: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Tokens (int32) and log-probs (float32), one a row.

    logits: (rows, vocabulary). temperature 0 takes the most likely token; its log-prob is that at temperature 1.
    The log-prob is of the distribution that was sampled from, top-k and top-p included. Inverse of the cumulated
    distribution at ``u``; a token of probability 0 is never chosen. Rows with NaN logits give NaN log-probs.
    """
    import torch

    greedy = temperature <= 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(logits.device)
    logp = torch.log_softmax(logits.float() / scale[:, None], -1)
    if (top_k > 0).any() or (top_p < 1).any():
        logp = _filtered(logp, top_p, top_k)
    cumulated = logp.double().exp_().cumsum(-1)
    at = torch.from_numpy(u).to(logits.device)[:, None] * cumulated[:, -1:]
    token = torch.searchsorted(cumulated, at, right=True).clamp_(max=logits.shape[-1] - 1)
    if greedy.any():
        token = torch.where(torch.from_numpy(greedy).to(logits.device)[:, None], logp.argmax(-1, keepdim=True), token)
    chosen = logp.gather(1, token)
    tokens: Any = token[:, 0].cpu().numpy().astype(np.int32)
    values: Any = chosen[:, 0].cpu().numpy()
    return tokens, values


def _filtered(
    logp: "torch.Tensor", top_p: npt.NDArray[np.float32], top_k: npt.NDArray[np.int32]
) -> "torch.Tensor":
    """Log-probs restricted to the ``top_k`` most likely tokens and the smallest set of mass ``top_p``, renormalised."""
    import torch

    ordered, index = logp.sort(-1, descending=True)
    rank = torch.arange(logp.shape[-1], device=logp.device)[None, :]
    before = ordered.exp().cumsum(-1) - ordered.exp()
    k = torch.from_numpy(np.where(top_k > 0, top_k, logp.shape[-1])).to(logp.device)
    p = torch.from_numpy(top_p).to(logp.device)
    keep = (rank < k[:, None]) & ((before < p[:, None]) | (rank == 0))
    masked = torch.full_like(logp, float("-inf")).scatter(1, index, ordered.masked_fill(~keep, float("-inf")))
    return torch.log_softmax(masked, -1)
