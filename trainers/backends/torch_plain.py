"""The backend on plain torch: replicated weights, gradients added up over ranks, AdamW on one flat fp32 master.

All parameters are views into one flat buffer, so an update is a handful of calls whatever the count of tensors. On one
machine the same batches in the same order give the same bits.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.schemas.config import TrainerConfig
from headrace.trainers.backends.adapters import constants_of
from headrace.trainers.backends.backend import Update, Weights
from headrace.trainers.backends.policy_model import PolicyModel
from headrace.trainers.backends.state_file import MASTER, SavedState, StatePart, owners
from headrace.trainers.batching import MicroBatch
from headrace.trainers.ranks import Ranks

__all__ = ("PlainTorch",)


class PlainTorch:
    """See ``Backend``. ``config.precision`` is that of forward and backward; master, moments and gradient are fp32."""

    def __init__(self, model: PolicyModel, config: TrainerConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._compute = torch.float32 if config.precision == "fp32" else torch.bfloat16
        self._model = model.to(ranks.device)
        named = model.published()
        for p in model.parameters():
            if not p.requires_grad:
                p.data = p.data.to(self._compute)
        self._shapes = [(name, p.shape) for name, p in named]
        self._constants = dict(constants_of(config.lora))
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
        return self.scores(micro, gradient=gradient)[0]

    def scores(self, micro: MicroBatch, *, gradient: bool) -> tuple[Tensor, Tensor]:
        """See ``Scores``."""
        micro = micro.to(self._ranks.device)
        with torch.set_grad_enabled(gradient):
            out: tuple[Tensor, Tensor] = self._model(micro.tokens, micro.mask, micro.temperature, micro.lengths)
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
        return out | self._constants

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See ``Backend``."""
        return {name: tuple(shape) for name, shape in self._shapes} | {n: x.shape for n, x in self._constants.items()}

    def shards(self) -> None:
        """See ``Backend``; every rank holds everything."""
        return

    def snapshot(self) -> StatePart:
        """See ``Backend``; ranks hold the same state, so each writes a part of it."""
        part = StatePart(self._ranks.rank, self._ranks.size)
        state = self._optimizer.state[self._master]
        part.step = float(state["step"]) if "step" in state else 0.0
        moments = [(kind, values) for kind, values in state.items() if kind != "step"]
        writers, at = owners([shape.numel() for _, shape in self._shapes], self._ranks.size), 0
        for (name, shape), writer in zip(self._shapes, writers, strict=True):
            here = slice(at, at := at + shape.numel())
            if writer == self._ranks.rank:
                for kind, values in ((MASTER, self._master), *moments):
                    part.add(kind, name, 0, values[here])
        return part

    def save(self, folder: Path) -> None:
        """See ``Backend``."""
        self.snapshot().write(folder)

    def load(self, folder: Path) -> None:
        """See ``Backend``."""
        saved = SavedState(folder)
        saved.check_names({name: shape.numel() for name, shape in self._shapes})
        state = self._optimizer.state[self._master]
        if saved.kinds:
            state["step"] = torch.tensor(saved.step)
        state.update({kind: torch.zeros_like(self._master, requires_grad=False) for kind in saved.kinds})
        at = 0
        with torch.no_grad():
            for name, shape in self._shapes:
                here = slice(at, at := at + shape.numel())
                for kind in (MASTER, *saved.kinds):
                    held = self._master if kind == MASTER else state[kind]
                    held[here].copy_(saved.read(kind, name, 0, shape.numel()))
        saved.restore_random(self._ranks.rank)
        self._round()
