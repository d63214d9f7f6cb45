"""A training backend in one file: plain SGD on a Hugging Face model, without any of headrace's model code.

In go micro-batches of padded rows; out come log-probs, and after every update the weights as bfloat16 bits. All else of
a trainer (reading lanes, losses, publishing, checkpoints of positions, resume) is headrace's and stays as it is.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from headrace.schemas.config import TrainerConfig
from headrace.trainers.backends.backend import Shards, Update, Weights
from headrace.trainers.batching import MicroBatch
from headrace.trainers.ranks import Ranks


class SgdBackend:
    """See ``headrace.trainers.backends.backend.Backend``: the master weights stay fp32, forward sees their rounding."""

    def __init__(self, config: TrainerConfig, folder: str, ranks: Ranks) -> None:
        self._ranks, self._limit = ranks, config.max_grad_norm
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._named = list(self._model.named_parameters())
        self._masters = [p.detach().clone() for _, p in self._named]
        self._round()

    def _round(self) -> None:
        for (_, p), master in zip(self._named, self._masters, strict=True):
            p.data.copy_(master.bfloat16())

    def logprobs(self, micro: MicroBatch, *, gradient: bool) -> torch.Tensor:
        """Rows are padded on the right, so causal attention needs no mask."""
        with torch.set_grad_enabled(gradient):
            logits = self._model(input_ids=micro.tokens).logits[:, :-1] / micro.temperature[:, None, None]
            chosen = logits.log_softmax(-1).gather(2, micro.tokens[:, 1:, None])[..., 0]
            return torch.where(micro.mask, torch.nn.functional.pad(chosen, (1, 0)), 0.0)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Gradients of micro-batches add up in ``p.grad``."""
        loss.backward()

    def step(self, lr: float) -> Update:
        """Add gradients up over ranks, clip, go downhill."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in self._named]
        for gradient in gradients:
            self._ranks.sum_tensor(gradient)
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
        applied = norm < float("inf")
        if applied:
            factor = lr * min(1.0, self._limit / (norm + 1e-6))
            for master, gradient in zip(self._masters, gradients, strict=True):
                master -= factor * gradient
            self._round()
        self._model.zero_grad()
        return Update(grad_norm=norm, applied=applied)

    def weights(self) -> Weights:
        """The bits of the rounding."""
        return {name: p.detach().bfloat16().view(torch.uint16).numpy() for name, p in self._named}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The same names on every rank."""
        return {name: tuple(p.shape) for name, p in self._named}

    def shards(self) -> Shards | None:
        """Every rank holds everything."""
        return None

    def save(self, folder: Path) -> None:
        """Every rank holds the same, so rank 0 writes it."""
        if self._ranks.leads:
            torch.save(self._masters, folder / "masters.pt")

    def load(self, folder: Path) -> None:
        """Masters, then their rounding."""
        self._masters = torch.load(folder / "masters.pt", weights_only=True)
        self._round()
