"""The contract of a training backend: log-probs with gradient in, updated bf16 weights out.

Whatever the precision of its arithmetic, a backend keeps fp32 master weights and computes on their bf16 rounding,
which is exactly what it publishes; so a rollout engine on the published weights computes what the trainer computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headrace.trainers.batching import MicroBatch

__all__ = ("Backend", "Update", "Weights")

Weights = Mapping[str, npt.NDArray[np.uint16]]
"""bf16 bit patterns by Hugging Face name, in the shape of the parameter; a tied storage appears once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An optimizer step: the gradient's norm before clipping, and False when it was skipped for not being finite."""

    grad_norm: float
    applied: bool


class Backend(Protocol):
    """One model under training. Every method is collective: all ranks call it, in the same order."""

    def logprobs(self, micro: MicroBatch, *, gradient: bool) -> Tensor:
        """Log-probs [rows, length] float32 of each trained token given what stands before it; 0 elsewhere."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of this rank's part of the batch's loss; ``last`` in the update's last micro-batch.

        The gradient is the sum over micro-batches and ranks, whatever the backend would average by itself.
        """
        ...

    def step(self, lr: float) -> Update:
        """Clip, update the masters at this learning rate and round them into the weights; gradients are cleared."""
        ...

    def weights(self) -> Weights:
        """What is published; complete on rank 0, valid until the next ``step``."""
        ...

    def save(self, folder: Path) -> None:
        """Write this rank's part of the state (masters, optimizer, random generators) into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Take up a state that ``save`` wrote with the same count of ranks. Raises ConfigurationError if it cannot."""
        ...
