"""Stand-ins for the log-probs of the policy at the start of a step, where a forward pass for them is left out.

In: behave and new log-probs and the version that sampled each token; out: prox, without gradient (docs/losses.md).
"""

from typing import Literal

import torch
from torch import Tensor

from headrace.trainers.losses.loss import finite_logprobs

__all__ = ("ProxMethod", "approximate_prox")

ProxMethod = Literal["forward", "loglinear", "linear", "behave"]
"""``forward`` computes prox; the others are approximations between behave and new."""


def approximate_prox(
    method: ProxMethod, behave: Tensor, new: Tensor, versions: Tensor, mask: Tensor, *, prox: int, now: int
) -> Tensor:
    """Log-probs of version ``prox`` of every trained token, [sequences, tokens], 0 elsewhere.

    A token sampled at version v has gone the share a = (prox - v) / (now - v), within 0 to 1, of the way from behave to
    new: in log-probs (loglinear), in probabilities (linear), or not at all (behave). Source: AReaL 4aef98d.
    """
    b, n = finite_logprobs(behave, mask), finite_logprobs(new.detach(), mask)
    if method == "behave":
        return b
    gap = (now - versions).clamp(min=1).to(b.dtype)
    share = ((prox - versions).to(b.dtype) / gap).clamp(0, 1)
    share = torch.where((versions >= 0) & (versions < now), share, torch.zeros_like(share))
    if method == "linear":
        return torch.log((1 - share) * b.exp() + share * n.exp() + 1e-10) * mask
    return b + share * (n - b)
