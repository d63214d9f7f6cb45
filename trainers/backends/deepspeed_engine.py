"""Opens a DeepSpeed engine for the backend: settings merged and checked, nothing compiled, no port of its own.

Goes in: the model, ``[trainer]`` and the ranks; comes out: an engine in evaluation mode whose optimizer is torch's.
What this project decides itself (accumulation, optimizer, learning rate) is refused in ``trainer.options``, with the
setting to use instead.
"""

import difflib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headrace.schemas.config import TrainerConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.ranks import Ranks

__all__ = ("engine_settings", "open_engine")

_DECIDED = {
    "train_batch_size": "trainer.batch_groups",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer": "trainer.lr, trainer.betas and trainer.weight_decay",
    "scheduler": "trainer.lr and trainer.warmup_steps",
    "fp16": 'trainer.precision = "bf16"',
    "sequence_parallel_size": "trainer.sequence_parallel",
    "activation_checkpointing": "trainer.activation_checkpointing",
}
"""Settings of DeepSpeed's that would contradict the trainer, and what to set instead."""


def open_engine(model: nn.Module, config: TrainerConfig, ranks: Ranks) -> Any:
    """A DeepSpeed engine around the model. Raises ConfigurationError for options that cannot be."""
    settings = engine_settings(config)
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
    _set_leaves(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True if _offloads(settings) else None,
    )
    with _nothing_compiled():
        try:
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        except (ValueError, TypeError, KeyError, AssertionError) as error:  # how DeepSpeed refuses a configuration
            raise ConfigurationError(f"DeepSpeed refuses trainer.options: {error}") from error
    engine.eval()
    return engine


def engine_settings(config: TrainerConfig) -> dict[str, Any]:
    """DeepSpeed's configuration: ``trainer.options`` over what this project needs. Raises ConfigurationError."""
    wrong = [f"{name} (use {_DECIDED[name]})" for name in config.options if name in _DECIDED]
    if wrong:
        raise ConfigurationError(f"trainer.options cannot set {', '.join(wrong)}: the trainer decides it")
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": {"stage": config.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "bf16": {"enabled": config.precision == "bf16"},
    }
    for name, value in config.options.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            settings[name] = {**settings[name], **value}
        else:
            settings[name] = value
    found = (settings["zero_optimization"].get("stage"), settings["bf16"].get("enabled"))
    if found != (config.zero_stage, config.precision == "bf16"):
        raise ConfigurationError(
            "trainer.options set another ZeRO stage or precision than trainer.zero_stage and trainer.precision; set "
            "those alone"
        )
    return settings


def _offloads(settings: dict[str, Any]) -> bool:
    device: str = settings["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    return device == "cpu"


def _set_leaves(model: nn.Module, config: TrainerConfig) -> None:
    """Mark the modules that ZeRO 3 gathers whole: which experts run differs between ranks, what is gathered may not."""
    names = {type(module).__name__ for module in model.modules()}
    for wanted in config.moe_leaf_modules:
        if wanted not in names:
            near = difflib.get_close_matches(wanted, names, n=1)
            raise ConfigurationError(
                f"trainer.moe_leaf_modules: the model has no module of class {wanted}"
                + (f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(names))}")
            )
    if config.moe_leaf_modules:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, config.moe_leaf_modules)


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
