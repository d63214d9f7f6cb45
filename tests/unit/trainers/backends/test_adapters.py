"""Adapters: only they are trained and published, and whoever adds them to the model has what the trainer computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tiny_models import make_family
from trainer_feed import make_config, make_items, make_model

from headrace.connectors.adapters import SCALING, added, holds_adapters, modules_of
from headrace.connectors.engines.engine import Request, generate
from headrace.connectors.engines.transformers import TransformersEngine
from headrace.schemas.config import LoraConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Sampling
from headrace.trainers.backends.backend import Backend
from headrace.trainers.backends.open import open_backend
from headrace.trainers.batching import MicroBatch, bare_rows, pack
from headrace.trainers.export import export_model
from headrace.trainers.ranks import Ranks

KINDS = [("torch", 0), ("deepspeed", 0), ("deepspeed", 2), ("deepspeed", 3)]
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def opened(model: Path, ranks: Ranks, kind: tuple[str, int], **more: Any) -> Backend:
    settings = {"precision": "fp32", "lora": LORA, **more}
    config = make_config(model, model.parent, "r", backend=kind[0], zero_stage=kind[1], **settings)
    return open_backend(config.trainer_of("main"), str(model), ranks)


def micro() -> MicroBatch:
    (found,) = pack(bare_rows(make_items(1, groups=4, size=4, version=0, seed=0)), 10_000)
    return found


def update(backend: Backend, steps: int = 3) -> None:
    for step in range(steps):
        new = backend.logprobs(micro(), gradient=True)
        signs = torch.sin(torch.arange(new.numel()) + step).view(new.shape)
        backend.backward(-(new * signs).sum() / 80, last=True)
        assert backend.step(1e-2).applied


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_adapter_file_of_what_is_published_gives_the_same_log_probs(
    model: Path, ranks: Ranks, kind: tuple[str, int], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    backend = opened(model, ranks, kind)
    weights = backend.weights()
    assert holds_adapters(weights)
    assert len(modules_of(weights)) == 2 * 7, "every linear layer but the head"
    assert {name: bits.shape for name, bits in weights.items()} == dict(backend.shapes())
    update(backend)
    found = backend.logprobs(micro(), gradient=False)
    weights = {name: bits.copy() for name, bits in backend.weights().items()}
    export_model(weights, model, tmp_path / "out")
    given = micro()
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float()
    before = whole(input_ids=given.tokens).logits
    adapted = PeftModel.from_pretrained(whole, tmp_path / "out" / "adapter", autocast_adapter_dtype=False).eval()
    logits = adapted(input_ids=given.tokens).logits / given.temperature[:, None, None]
    every = logits.log_softmax(-1)
    chosen = every[:, :-1].gather(2, given.tokens[:, 1:, None])[..., 0]
    wanted = torch.where(given.mask, torch.nn.functional.pad(chosen, (1, 0)), 0.0)
    assert torch.allclose(found, wanted, atol=2e-5)
    assert (before - logits).abs().max() > 0.01, "training did something"


def test_engines_on_a_published_adapter_compute_what_the_trainer_computes(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    backend = opened(model, ranks, ("torch", 0))
    update(backend)
    engine = TransformersEngine(model, slots=4, max_prompt_tokens=32)
    engine.load_weights(backend.weights(), 1)
    prompts = [np.array([5, 6, 7], np.int32), np.array([8, 4], np.int32)]
    sampling = Sampling(temperature=0.8, max_new_tokens=12, seed=3)
    for prompt, done in zip(
        prompts, generate(engine, [Request(i, p, sampling) for i, p in enumerate(prompts)]), strict=True
    ):
        tokens = torch.from_numpy(np.concatenate([prompt, done.tokens]).astype(np.int64))[None]
        mask = (torch.arange(tokens.shape[1]) >= prompt.size)[None]
        row = replace(
            micro(), tokens=tokens, mask=mask, temperature=torch.tensor([0.8]), lengths=torch.tensor([tokens.shape[1]])
        )
        found = backend.logprobs(row, gradient=False)[mask]
        assert torch.allclose(found, torch.from_numpy(done.logprobs), atol=1e-5)
    export_model(backend.weights(), model, tmp_path / "out")
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    state, own = merged.state_dict(), engine._model.state_dict()
    assert all(torch.equal(own[name].bfloat16().float(), p) for name, p in state.items())


@pytest.mark.parametrize("kind", [("torch", 0), ("deepspeed", 3)], ids=str)
def test_a_saved_state_of_adapters_goes_on(model: Path, ranks: Ranks, kind: tuple[str, int], tmp_path: Path) -> None:
    backend = opened(model, ranks, kind)
    update(backend)
    backend.save(tmp_path)
    update(backend, 2)
    wanted = {name: bits.copy() for name, bits in backend.weights().items()}
    other = opened(model, ranks, kind)
    other.load(tmp_path)
    update(other, 2)
    assert all(np.array_equal(bits, wanted[name]) for name, bits in other.weights().items())


def test_adapters_begin_alike_everywhere_and_change_nothing(model: Path, ranks: Ranks) -> None:
    torch.manual_seed(5)
    first = dict(opened(model, ranks, ("torch", 0)).weights())
    torch.rand(100)  # another process would have drawn other numbers by now
    again = opened(model, ranks, ("deepspeed", 1))
    assert all(np.array_equal(bits, first[name]) for name, bits in again.weights().items())
    plain = opened(model, ranks, ("torch", 0), lora={})
    assert torch.equal(again.logprobs(micro(), gradient=False), plain.logprobs(micro(), gradient=False))
    torch.manual_seed(6)
    other = opened(model, ranks, ("torch", 0)).weights()
    assert not all(np.array_equal(bits, first[name]) for name, bits in other.items()), "a run's seed matters"


def test_bf16_arithmetic_and_checkpointed_activations_train_adapters(model: Path, ranks: Ranks) -> None:
    plain = opened(model, ranks, ("torch", 0))
    update(plain)
    for kind in (("torch", 0), ("deepspeed", 2), ("deepspeed", 3)):
        backend = opened(model, ranks, kind, precision="bf16", activation_checkpointing=True)
        update(backend)
        away = (backend.logprobs(micro(), gradient=False) - plain.logprobs(micro(), gradient=False)).abs()
        assert away.mean() < 0.05, kind


def test_scalings_that_bf16_cannot_hold_are_refused() -> None:
    assert LoraConfig(rank=16, alpha=32).scaling == 2.0
    assert LoraConfig(rank=64, alpha=16).scaling == 0.25
    assert LoraConfig().scaling == 1.0
    with pytest.raises(ValidationError, match="power of two"):
        LoraConfig(rank=16, alpha=10)


def test_an_adapter_of_another_model_is_refused(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    weights = dict(opened(model, ranks, ("torch", 0)).weights())
    other = make_family(tmp_path / "other", "Qwen3", hidden_size=48, head_dim=12, num_attention_heads=4)
    engine = TransformersEngine(other, slots=1, max_prompt_tokens=8)
    with pytest.raises(ConfigurationError, match="same model folder"):
        engine.load_weights(weights, 1)
    with pytest.raises(ConfigurationError, match="missing"):
        added(weights, [], lambda name: np.zeros((1, 1), np.float32))
    lost = next(name for name in weights if name.endswith("lora_B.weight"))
    del weights[lost]
    with pytest.raises(ConfigurationError, match="one matrix"):
        added(weights, [], lambda name: np.zeros((1, 1), np.float32))
    assert SCALING in weights
