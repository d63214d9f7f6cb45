"""From a loss per token to one number, by counts of the whole batch (docs/losses.md).

The denominators are fixed before any rejection and are the same for every micro-batch and rank, so that adding up the
values of all micro-batches gives the value of the batch. In the modes that count sequences a trajectory of 30 sequences
weighs 1, or 30 with ``trainer.aggregation_unit = "sequence"``; in ``token-mean`` it weighs as many tokens as it has.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.losses.loss import select

__all__ = ("MODES", "Denominators", "Mode", "aggregate", "mode_named")

Mode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts over the whole batch: trained tokens, sequences with a trained token, and the constant of sum-norm.

    What counts as one sequence is the caller's choice: a row, or all rows of a trajectory.
    """

    tokens: int
    sequences: int
    constant: float


def mode_named(name: str) -> Mode:
    """The mode of that name. Raises ConfigurationError."""
    for mode in MODES:
        if mode == name:
            return mode
    raise ConfigurationError(f"trainer.aggregation is {name!r}; modes are {', '.join(MODES)}")


def aggregate(
    loss: Tensor, mask: Tensor, mode: Mode, counts: Denominators, unit_tokens: Tensor | None = None
) -> Tensor:
    """The part of the batch's loss that these rows [sequences, tokens] contribute, as a 0-d tensor.

    token-mean divides the sum by all tokens, seq-mean-token-sum by all sequences; seq-mean-token-mean averages within
    each sequence first; seq-mean-token-sum-norm divides by a constant only. Rows without a trained token contribute 0.
    unit_tokens: trained tokens of the sequence that each row is a part of, [rows]; None: the row is all of it.
    """
    kept = select(loss, mask)
    if mode == "token-mean":
        return kept.sum() / max(1, counts.tokens)
    if mode == "seq-mean-token-sum":
        return kept.sum() / max(1, counts.sequences)
    if mode == "seq-mean-token-sum-norm":
        return kept.sum() / counts.constant
    lengths = mask.sum(-1).clamp(min=1) if unit_tokens is None else unit_tokens
    return torch.div(kept.sum(-1), lengths.to(kept.dtype)).sum() / max(1, counts.sequences)
