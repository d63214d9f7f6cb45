"""The backend on DeepSpeed: ZeRO 0 to 3, bf16 or fp32 arithmetic, one or several ranks.

DeepSpeed keeps the fp32 masters; where it would compute on them (fp32 arithmetic), this backend rounds the weights of
the forward pass to bf16 after every step. Nothing is compiled at start: the optimizer is torch's and the shared memory
operation for CPU ranks is left out. DeepSpeed's own scaling by accumulation steps is off and its boundary is set here.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.schemas.config import TrainerConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.backend import Update, Weights
from headrace.trainers.backends.policy_model import PolicyModel
from headrace.trainers.batching import MicroBatch
from headrace.trainers.ranks import Ranks

__all__ = ("DeepSpeed",)

_TAG = "state"


class DeepSpeed:
    """See ``Backend``. ``config.options`` are merged over DeepSpeed's configuration."""

    def __init__(self, model: PolicyModel, config: TrainerConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._stage = config.zero_stage
        self._engine = _engine(model, config, ranks)
        self._named = [(name.removeprefix("model."), p) for name, p in self._engine.module.named_parameters()]
        self._parameters = [p for _, p in self._named]
        fp32 = config.precision == "fp32"
        self._rounds = fp32
        self._masters = [p.detach().clone() for p in self._parameters] if fp32 and self._stage == 0 else []
        self._round()

    def logprobs(self, micro: MicroBatch, *, gradient: bool) -> Tensor:
        """See ``Backend``."""
        micro = micro.to(self._ranks.device)
        with torch.set_grad_enabled(gradient):
            out: Tensor = self._engine(micro.tokens, micro.mask, micro.temperature)
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
            return {
                name: p.detach().to("cpu", torch.bfloat16, copy=True).contiguous().view(torch.uint16).numpy()
                for name, p in self._named
            }

    def save(self, folder: Path) -> None:
        """See ``Backend``."""
        client: dict[str, Any] = {"headrace_rng": torch.get_rng_state()}
        self._engine.save_checkpoint(str(folder), tag=_TAG, client_state=client, save_latest=False)
        if self._masters and self._ranks.leads:
            torch.save([m.cpu() for m in self._masters], folder / "masters.pt")
        (folder / f"deepspeed-{self._ranks.rank}.txt").write_text(
            f"ranks {self._ranks.size} stage {self._stage} precision {self._config.precision}\n", "utf-8"
        )

    def load(self, folder: Path) -> None:
        """See ``Backend``."""
        note = folder / "deepspeed-0.txt"
        wanted = f"ranks {self._ranks.size} stage {self._stage} precision {self._config.precision}"
        found = note.read_text("utf-8").strip() if note.is_file() else "another backend"
        if found != wanted:
            raise ConfigurationError(
                f"checkpoint {folder} was written by {found}, this trainer is {wanted}; set trainer.backend, ranks, "
                "zero_stage and precision back"
            )
        _, client = self._engine.load_checkpoint(str(folder), tag=_TAG)
        if client and "headrace_rng" in client:
            torch.set_rng_state(client["headrace_rng"])
        if self._masters:
            for mine, saved in zip(self._masters, torch.load(folder / "masters.pt", weights_only=True), strict=True):
                mine.copy_(saved)
            torch._foreach_copy_([p.data for p in self._parameters], self._masters)
        self._round()

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


def _engine(model: PolicyModel, config: TrainerConfig, ranks: Ranks) -> Any:
    """A DeepSpeed engine around the model, without compilation, output or a port of its own."""
    if ranks.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if ranks.device.type == "cpu":
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo" if ranks.device.type == "cpu" else "nccl", verbose=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
    )
    with _nothing_compiled():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_settings(config))
    engine.eval()
    return engine


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Leave torch.compile out while DeepSpeed starts: it decorates an optimizer that is not used here, and loading the
    compiler for that takes a second and 40 MB.
    """
    real = torch.compile

    def leave(function: Any = None, **_: Any) -> Any:
        return function if function is not None else leave

    torch.compile = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = real


def _settings(config: TrainerConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": {"stage": config.zero_stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "bf16": {"enabled": config.precision == "bf16"},
    }
    for name, value in config.options.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            settings[name] = {**settings[name], **value}
        else:
            settings[name] = value
    return settings
