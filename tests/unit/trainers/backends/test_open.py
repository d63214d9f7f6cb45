"""Backends by name or module:Class, and that any of them keeps the contract, also one from outside."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_probe import train
from trainer_feed import make_config, make_items, make_model

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.backend import Backend
from headrace.trainers.backends.open import open_backend
from headrace.trainers.batching import bare_rows, pack
from headrace.trainers.ranks import Ranks

RECIPE = Path(__file__).resolve().parents[4] / "recipes" / "own_trainer"
NAMES = ["torch", "sgd_backend:SgdBackend"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(autouse=True)
def recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))


def opened(model: Path, name: str) -> Backend:
    config = make_config(model, model.parent, "r", backend=name)
    return open_backend(config.trainer_of("main"), str(model), Ranks())


def bits(backend: Backend) -> dict[str, np.ndarray]:
    return {name: found.copy() for name, found in backend.weights().items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_computes_on_what_it_publishes(model: Path, name: str) -> None:
    """Another process with the published weights has the same log-probs; whole batches train."""
    backend = opened(model, name)
    config = make_config(model, model.parent, "r", backend=name, lr=0.05)
    metrics = train(config, backend, Ranks(), range(1, 4))
    assert metrics["optim/grad_norm"] > 0
    published = bits(backend)
    assert {key: found.shape for key, found in published.items()} == dict(backend.shapes())
    (micro,) = pack(bare_rows(make_items(1, groups=4, size=4, version=0, seed=0)), 10_000)
    from transformers import AutoModelForCausalLM

    fresh: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    state = {key: torch.from_numpy(found).view(torch.bfloat16).float() for key, found in published.items()}
    assert not fresh.load_state_dict(state, strict=False).unexpected_keys
    every = (fresh(input_ids=micro.tokens).logits / micro.temperature[:, None, None]).log_softmax(-1)
    wanted = torch.nn.functional.pad(every[:, :-1].gather(2, micro.tokens[:, 1:, None])[..., 0], (1, 0))
    found = backend.logprobs(micro, gradient=False)
    assert torch.allclose(found, torch.where(micro.mask, wanted, 0.0), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_goes_on_bit_by_bit_and_bad_gradients_are_skipped(model: Path, name: str, tmp_path: Path) -> None:
    config = make_config(model, model.parent, "r", backend=name)
    backend = opened(model, name)
    train(config, backend, Ranks(), range(1, 3))
    backend.save(tmp_path)
    before = bits(backend)
    (micro,) = pack(bare_rows(make_items(1, groups=4, size=4, version=0, seed=0)), 10_000)
    backend.backward((backend.logprobs(micro, gradient=True) * float("inf")).sum(), last=True)
    assert not backend.step(1e-3).applied
    assert all(np.array_equal(found, before[key]) for key, found in bits(backend).items())
    train(config, backend, Ranks(), range(3, 5))
    other = opened(model, name)
    other.load(tmp_path)
    train(config, other, Ranks(), range(3, 5))
    wanted = bits(backend)
    assert all(np.array_equal(found, wanted[key]) for key, found in bits(other).items())


def test_updates_of_two_sizes_of_micro_batches_agree_with_a_backend_from_outside(model: Path) -> None:
    ends = []
    for tokens in (10_000, 40):
        config = make_config(model, model.parent, "r", backend=NAMES[1], lr=0.05, micro_batch_tokens=tokens)
        backend = opened(model, NAMES[1])
        train(config, backend, Ranks(), range(1, 4))
        ends.append(np.concatenate([found.ravel() for found in bits(backend).values()]))
    assert (ends[0] != ends[1]).mean() < 0.01


def test_unknown_names_and_halves_of_backends_are_refused(model: Path) -> None:
    with pytest.raises(ConfigurationError, match="Installed: deepspeed, torch"):
        opened(model, "jax")
    with pytest.raises(ConfigurationError, match="cannot be imported"):
        opened(model, "no_such_module:Backend")
    with pytest.raises(ConfigurationError, match="gives a chain without logprobs, backward"):
        opened(model, "itertools:chain")
