"""The contract of a training backend: log-probs with gradient in, updated bf16 weights out.

Whatever the precision of its arithmetic, a backend keeps fp32 master weights and computes on their bf16 rounding,
which is exactly what it publishes; so a rollout engine on the published weights computes what the trainer computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headrace.trainers.batching import MicroBatch

__all__ = ("Backend", "Outgoing", "Scores", "Shards", "TensorShard", "Update", "Weights")

Weights = Mapping[str, npt.NDArray[np.uint16]]
"""bf16 bit patterns by Hugging Face name, in the shape of the parameter; a tied storage appears once."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Elements ``start`` and following of a tensor, flat, as raw bits (unsigned integers of its width, [count])."""

    start: int
    bits: npt.NDArray[Any]


Shards = Mapping[str, TensorShard]
"""What one rank holds of every published tensor, by Hugging Face name; all ranks together hold every element once."""

Outgoing = Weights | Shards
"""What a rank gives for publishing: everything on rank 0, or its shards."""


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

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of what is published, in order, the same on every rank."""
        ...

    def shards(self) -> Shards | None:
        """What this rank holds of the weights, valid until the next ``step``; None where ``weights`` is to be used."""
        ...

    def save(self, folder: Path) -> None:
        """Write this rank's part of the state (masters, optimizer, random generators) into an existing folder.

        A backend that also has ``snapshot`` (see ``Snapshots``) is saved beside its next step instead.
        """
        ...

    def load(self, folder: Path) -> None:
        """Take up a state that ``save`` wrote, with any count of ranks. Raises ConfigurationError if it cannot."""
        ...


@runtime_checkable
class Scores(Protocol):
    """A backend that gives the entropy of every trained token beside its log-prob; collective as all of ``Backend``."""

    def scores(self, micro: MicroBatch, *, gradient: bool) -> tuple[Tensor, Tensor]:
        """Log-probs as ``logprobs`` gives them, and entropies in nats, both [rows, length] float32, 0 elsewhere."""
        ...


class StateWriter(Protocol):
    """A rank's part of a state in host memory, as it was when it was copied."""

    def write(self, folder: Path) -> None:
        """Write it into an existing folder, from any thread; file names differ between ranks. Raises OSError."""
        ...


@runtime_checkable
class Snapshots(Protocol):
    """A backend whose state can be copied at once and written later; collective as all of ``Backend``."""

    def snapshot(self) -> StateWriter:
        """This rank's part of the state, copied to host memory."""
        ...
