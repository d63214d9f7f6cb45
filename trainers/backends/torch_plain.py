"""The backend on plain torch: replicated weights, gradients added up over ranks, AdamW on one flat fp32 master.

All parameters are views into one flat buffer, so an update is a handful of calls whatever the count of tensors. On one
machine the same batches in the same order give the same bits.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.schemas.config import TrainerConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.backend import Update, Weights
from headrace.trainers.backends.policy_model import PolicyModel
from headrace.trainers.batching import MicroBatch
from headrace.trainers.ranks import Ranks

__all__ = ("PlainTorch",)


class PlainTorch:
    """See ``Backend``. ``config.precision`` is that of forward and backward; master, moments and gradient are fp32."""

    def __init__(self, model: PolicyModel, config: TrainerConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._compute = torch.float32 if config.precision == "fp32" else torch.bfloat16
        self._model = model.to(ranks.device)
        named = [(name.removeprefix("model."), p) for name, p in model.named_parameters()]
        self._shapes = [(name, p.shape) for name, p in named]
        self._master = torch.cat([p.detach().float().reshape(-1) for _, p in named])
        self._flat = torch.empty_like(self._master, dtype=self._compute)
        self._grad = torch.zeros_like(self._flat)
        self._total = self._grad if self._compute == torch.float32 else torch.zeros_like(self._master)
        self._parameters = [p for _, p in named]
        at = 0
        for p in self._parameters:
            p.data = self._flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        self._attach_gradients()
        self._master.grad = self._total
        self._optimizer = torch.optim.AdamW(
            [self._master], lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self._round()

    def _attach_gradients(self) -> None:
        at = 0
        for p in self._parameters:
            p.grad = self._grad[at : at + p.numel()].view(p.shape)
            at += p.numel()

    def _round(self) -> None:
        self._flat.copy_(self._master.to(torch.bfloat16))

    def logprobs(self, micro: MicroBatch, *, gradient: bool) -> Tensor:
        """See ``Backend``."""
        micro = micro.to(self._ranks.device)
        with torch.set_grad_enabled(gradient):
            out: Tensor = self._model(micro.tokens, micro.mask, micro.temperature)
            return out

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See ``Backend``."""
        loss.backward()  # type: ignore[no-untyped-call]
        if self._total is not self._grad:
            self._total.add_(self._grad)
            self._grad.zero_()

    def step(self, lr: float) -> Update:
        """See ``Backend``."""
        self._ranks.sum_tensor(self._total)
        norm = float(torch.linalg.vector_norm(self._total))
        applied = bool(np.isfinite(norm))
        if applied:
            limit = self._config.max_grad_norm
            if limit and norm > limit:
                self._total.mul_(limit / (norm + 1e-6))
            self._optimizer.param_groups[0]["lr"] = lr
            self._optimizer.step()
            self._round()
        self._total.zero_()
        return Update(grad_norm=norm, applied=applied)

    def weights(self) -> Weights:
        """See ``Backend``."""
        bits = self._flat.detach().to("cpu", torch.bfloat16, copy=True).view(torch.uint16).numpy()
        out, at = {}, 0
        for name, shape in self._shapes:
            out[name] = bits[at : at + shape.numel()].reshape(tuple(shape))
            at += shape.numel()
        return out

    def save(self, folder: Path) -> None:
        """See ``Backend``; ranks hold the same weights, so rank 0 writes them and the others their generators."""
        state = {"rng": torch.get_rng_state(), "ranks": self._ranks.size}
        if self._ranks.leads:
            state |= {"master": self._master.detach(), "optimizer": self._optimizer.state_dict()}
        torch.save(state, folder / f"torch-{self._ranks.rank}.pt")

    def load(self, folder: Path) -> None:
        """See ``Backend``; another count of ranks is fine, then the generators of new ranks start afresh."""
        whole = folder / "torch-0.pt"
        if not whole.is_file():
            raise ConfigurationError(f"{folder} was not written by the torch backend; set trainer.backend back")
        state = torch.load(whole, map_location=self._ranks.device, weights_only=True)
        with torch.no_grad():
            self._master.copy_(state["master"])
        self._optimizer.load_state_dict(state["optimizer"])
        own = folder / f"torch-{self._ranks.rank}.pt"
        if own.is_file():
            torch.set_rng_state(torch.load(own, map_location="cpu", weights_only=True)["rng"])
        self._round()
