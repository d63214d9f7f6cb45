"""What may stand in trainer.options, what is refused with the key to use instead, and offloading to the host."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_probe import train
from tiny_models import make_family
from trainer_feed import make_config, make_model

from headrace.schemas.config import TrainerConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.deepspeed_engine import engine_settings
from headrace.trainers.backends.open import open_backend
from headrace.trainers.ranks import Ranks


def test_options_are_merged_over_what_the_trainer_needs() -> None:
    options = {"zero_optimization": {"overlap_comm": False}, "bf16": {"immediate_grad_update": True}, "wall_clock": 1}
    settings = engine_settings(TrainerConfig(zero_stage=2, options=options, max_grad_norm=0.5))
    assert settings["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert settings["bf16"] == {"enabled": True, "immediate_grad_update": True}
    assert (settings["wall_clock"], settings["gradient_clipping"]) == (1, 0.5)
    assert settings["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("gradient_accumulation_steps", 4, "micro_batch_tokens"),
        ("train_batch_size", 64, "batch_groups"),
        ("optimizer", {"type": "AdamW"}, "trainer.lr"),
        ("scheduler", {"type": "WarmupLR"}, "warmup_steps"),
        ("fp16", {"enabled": True}, "precision"),
        ("gradient_clipping", 2.0, "max_grad_norm"),
        ("sequence_parallel_size", 2, "sequence_parallel"),
    ],
)
def test_what_the_trainer_decides_is_refused_with_its_own_key(name: str, value: Any, instead: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} \(use .*{instead}"):
        engine_settings(TrainerConfig(options={name: value}))


@pytest.mark.parametrize("options", [{"zero_optimization": {"stage": 3}}, {"bf16": {"enabled": False}}])
def test_a_second_opinion_on_stage_or_precision_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="zero_stage"):
        engine_settings(TrainerConfig(zero_stage=2, options=options))


def test_an_option_that_deepspeed_does_not_take_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    model = make_model(tmp_path / "m")
    config = TrainerConfig(zero_stage=1, options={"zero_optimization": {"reduce_bucket_size": "large"}})
    with pytest.raises(ConfigurationError, match=r"DeepSpeed refuses trainer\.options"):
        open_backend(config, str(model), ranks)


def test_leaf_modules_that_the_model_does_not_have_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    model = make_family(tmp_path / "m", "Qwen3Moe")
    config = TrainerConfig(zero_stage=3, moe_leaf_modules=["Qwen3MoeSparseMoeBlok"])
    with pytest.raises(ConfigurationError, match="did you mean Qwen3MoeSparseMoeBlock"):
        open_backend(config, str(model), ranks)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_and_moments_on_the_host_train_the_same(tmp_path: Path, ranks: Ranks, stage: int) -> None:
    model = make_model(tmp_path / "m")
    offload: dict[str, Any] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    if stage == 3:
        offload["zero_optimization"]["offload_param"] = {"device": "cpu"}
    ends = []
    for options in ({}, offload):
        config = make_config(model, tmp_path, "r", backend="deepspeed", zero_stage=stage, options=options)
        backend = open_backend(config.trainer_of("main"), str(model), ranks)
        train(config, backend, ranks, range(1, 4))
        ends.append(np.concatenate([found.ravel() for found in backend.weights().values()]))
    first, second = (torch.from_numpy(end.copy()).view(torch.bfloat16).float() for end in ends)
    assert (first != second).float().mean() < 0.05
    assert (first - second).abs().max() < 0.01
    assert backend._engine.optimizer.__class__.__name__.startswith("DeepSpeedZero")  # type: ignore[attr-defined]
