"""The backend on DeepSpeed: ZeRO 0 to 3, bf16 or fp32 arithmetic, one or several ranks.

DeepSpeed keeps the fp32 masters; where it would compute on them (fp32 arithmetic), this backend rounds the weights of
the forward pass to bf16 after every step. Nothing is compiled at start: the optimizer is torch's and the shared memory
operation for CPU ranks is left out. DeepSpeed's own scaling by accumulation steps is off and its boundary is set here.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from headrace.schemas.config import TrainerConfig
from headrace.trainers.backends.adapters import constants_of
from headrace.trainers.backends.backend import Shards, TensorShard, Update, Weights
from headrace.trainers.backends.deepspeed_engine import open_engine
from headrace.trainers.backends.deepspeed_state import copy_state, put_state_back
from headrace.trainers.backends.policy_model import PolicyModel
from headrace.trainers.backends.state_file import SavedState, StatePart
from headrace.trainers.backends.zero3 import full_shape, sharded_over, zero3_shards
from headrace.trainers.batching import MicroBatch
from headrace.trainers.ranks import Ranks

__all__ = ("DeepSpeed",)


class DeepSpeed:
    """See ``Backend``. ``config.options`` are merged over DeepSpeed's configuration."""

    def __init__(self, model: PolicyModel, config: TrainerConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._stage = config.zero_stage
        self._engine = open_engine(model, config, ranks)
        self._named = model.published()
        self._constants = constants_of(config.lora)
        self._parameters = [p for _, p in self._named]
        fp32 = config.precision == "fp32"
        self._rounds = fp32
        self._masters = [p.detach().clone() for p in self._parameters] if fp32 and self._stage == 0 else []
        self._round()

    def logprobs(self, micro: MicroBatch, *, gradient: bool) -> Tensor:
        """See ``Backend``."""
        return self.scores(micro, gradient=gradient)[0]

    def scores(self, micro: MicroBatch, *, gradient: bool) -> tuple[Tensor, Tensor]:
        """See ``Scores``."""
        micro = micro.to(self._ranks.device)
        with torch.set_grad_enabled(gradient):
            out: tuple[Tensor, Tensor] = self._engine(micro.tokens, micro.mask, micro.temperature, micro.lengths)
            return out

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See ``Backend``; DeepSpeed averages over ranks, so the loss is multiplied by their count."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks.size, scale_wrt_gas=False)
        if not last:
            self._engine.step()

    def step(self, lr: float) -> Update:
        """See ``Backend``."""
        before = self._engine.skipped_steps
        if self._masters:
            torch._foreach_copy_([p.data for p in self._parameters], self._masters)
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            if not all(bool(torch.isfinite(g).all()) for g in gradients):
                self._engine.zero_grad()
                self._round()
                return Update(grad_norm=float("nan"), applied=False)
            norm_here = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        applied = self._engine.skipped_steps == before
        norm = norm_here if self._masters else float(self._engine.get_global_grad_norm() or 0.0)
        if self._masters:
            torch._foreach_copy_(self._masters, [p.data for p in self._parameters])
        self._round()
        return Update(grad_norm=norm, applied=applied)

    def weights(self) -> Weights:
        """See ``Backend``; under ZeRO 3 the shards are gathered."""
        with self._gathered():
            if not self._ranks.leads:
                return {}
            own = {
                name: p.detach().to("cpu", torch.bfloat16, copy=True).contiguous().view(torch.uint16).numpy()
                for name, p in self._named
            }
            return {**own, **self._constants}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See ``Backend``."""
        own = {name: full_shape(p) for name, p in self._named}
        return own | {name: bits.shape for name, bits in self._constants.items()}

    def shards(self) -> Shards | None:
        """See ``Backend``: under ZeRO 3 with several ranks; where ranks share shards among few, they are gathered."""
        ranks = self._ranks
        if self._stage < 3 or ranks.size == 1 or not sharded_over(self._parameters, ranks.size):
            return None
        # Rank 0 alone gives away what never changes.
        fixed = {n: TensorShard(0, bits if ranks.leads else bits[:0]) for n, bits in self._constants.items()}
        return {**zero3_shards(dict(self._named), ranks.rank), **fixed}

    def snapshot(self) -> StatePart:
        """See ``Backend``."""
        return copy_state(self._engine, self._trained(), self._masters, self._ranks)

    def save(self, folder: Path) -> None:
        """See ``Backend``."""
        self.snapshot().write(folder)

    def load(self, folder: Path) -> None:
        """See ``Backend``."""
        saved = SavedState(folder)
        put_state_back(self._engine, self._trained(), self._masters, self._ranks, saved)
        saved.restore_random(self._ranks.rank)
        self._round()

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self._named if p.requires_grad]

    def _round(self) -> None:
        """Round what the forward pass computes with to bf16; the masters stay as they are."""
        if not self._rounds:
            return
        for p in self._parameters:
            shard = getattr(p, "ds_tensor", None)
            if shard is not None:
                shard.data.copy_(shard.data.to(torch.bfloat16))
            if p.numel():
                p.data.copy_(p.data.to(torch.bfloat16))

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        if self._stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(self._parameters):
            yield
