"""How far the trainer's policy is from the one that sampled: per token and per sequence, for metrics and masks.

In: log-probs of both and the mask; out: sums that add up over micro-batches and ranks (docs/losses.md, metrics).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headrace.trainers.losses.loss import FAR, Streams, finite_logprobs, log_ratio, select

__all__ = ("Divergence", "sequence_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Of prox from behave: ``sums`` over trained tokens, ``rows`` over sequences that have one, ``peaks`` maxima over
    them (-inf where there is none).

    Divided by their counts: ``mismatch_kl`` (k3), ``mismatch/kl`` (k1), ``mismatch/ratio_squared`` (1 + chi-squared),
    and per sequence perplexity by either policy, its log, their difference and ratio, and
    ``mismatch/sequence_ratio_squared``.
    """

    sums: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]
    peaks: Mapping[str, Tensor]

    @classmethod
    def of(cls, streams: Streams, limit: float = 20.0) -> Self:
        """The divergence in these rows, without gradient."""
        with torch.no_grad():
            mask = streams.mask
            away = log_ratio(streams.prox, streams.behave, mask, limit)
            ratio = select(away.exp(), mask)
            lengths = mask.sum(-1)
            used, n = lengths > 0, lengths.clamp(min=1).to(away.dtype)
            train = -finite_logprobs(streams.prox, mask).sum(-1) / n
            rollout = -finite_logprobs(streams.behave, mask).sum(-1) / n
            apart = select(train - rollout, used)
            whole = log_ratio(streams.prox, streams.behave, mask, FAR).sum(-1).clamp(-limit, limit)
            rows = {
                "training_ppl": train.clamp(max=limit).exp(), "training_log_ppl": train,
                "rollout_ppl": rollout.clamp(max=limit).exp(), "rollout_log_ppl": rollout,
                "log_ppl_diff": apart, "log_ppl_abs_diff": apart.abs(), "ppl_ratio": apart.clamp(-limit, limit).exp(),
                "sequence_ratio_squared": (2 * whole).exp(),
            }  # fmt: skip
            return cls(
                sums={
                    "mismatch_kl": select(ratio - 1 - away, mask).sum(),
                    "mismatch/kl": -away.sum(),
                    "mismatch/ratio_squared": (ratio * ratio).sum(),
                },
                rows={f"mismatch/{name}": select(value, used).sum() for name, value in rows.items()},
                peaks={
                    "mismatch/log_ppl_diff_max": torch.where(used, apart, -torch.inf).amax(),
                    "mismatch/log_ppl_diff_negative_max": torch.where(used, -apart, -torch.inf).amax(),
                },
            )


def sequence_mask(away: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """0.0 on trained tokens with a negative advantage whose sequence has mean ``-away`` above ``delta``, else 1.0.

    ``away`` is log(new / anchor), [sequences, tokens]: what is masked are bad samples the policy has left already.
    """
    lengths = mask.sum(-1, keepdim=True).clamp(min=1).to(away.dtype)
    left = -select(away, mask).sum(-1, keepdim=True) / lengths > delta
    return (~(left & (advantages < 0) & mask)).to(away.dtype)
