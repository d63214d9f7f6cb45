"""What every backend promises: exact log-probs on published weights, sums over micro-batches, resumable state."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_probe import train
from trainer_feed import make_config, make_items, make_model

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.advantages.advantage import AdvantageOptions
from headrace.trainers.advantages.dr import GroupCentered
from headrace.trainers.backends.backend import Backend, Weights
from headrace.trainers.backends.load_model import load_policy_model
from headrace.trainers.backends.open import open_backend
from headrace.trainers.backends.policy_model import PolicyModel
from headrace.trainers.batching import MicroBatch, pack, rows_of
from headrace.trainers.ranks import Ranks

KINDS = [("torch", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def opened(model: Path, ranks: Ranks, kind: tuple[str, int], **more: Any) -> Backend:
    config = make_config(model, model.parent, "r", backend=kind[0], zero_stage=kind[1], **{"precision": "fp32", **more})
    return open_backend(config.trainer_of("main"), str(model), ranks)


def micros(tokens: int = 10_000) -> list[MicroBatch]:
    items = make_items(1, groups=4, size=4, version=0, seed=0)
    return pack(rows_of(items, GroupCentered(AdvantageOptions())), tokens)


def update(backend: Backend, parts: list[MicroBatch], lr: float = 1e-3) -> float:
    for at, micro in enumerate(parts):
        new = backend.logprobs(micro, gradient=True)
        backend.backward(-(new * micro.advantages).sum() / 80, last=at == len(parts) - 1)
    return backend.step(lr).grad_norm


def floats(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(bits.copy()).view(torch.bfloat16).float() for name, bits in weights.items()}


def flat(weights: Weights) -> np.ndarray:
    return np.concatenate([t.numpy().ravel() for t in floats(weights).values()])


def reference(model: Path, weights: Weights) -> PolicyModel:
    """Another copy of the model in fp32, with the published weights."""
    fresh = load_policy_model(model)
    _, unexpected = fresh.model.load_state_dict(floats(weights), strict=False)
    assert not unexpected
    return fresh


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_log_probs_are_those_of_the_published_weights(model: Path, ranks: Ranks, kind: tuple[str, int]) -> None:
    backend = opened(model, ranks, kind)
    for _ in range(3):
        update(backend, micros(64))
        (micro,) = micros()
        with torch.no_grad():
            wanted, _ = reference(model, backend.weights())(micro.tokens, micro.mask, micro.temperature, micro.lengths)
        assert torch.allclose(backend.logprobs(micro, gradient=False), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", [("torch", 0), ("deepspeed", 1)], ids=str)
def test_bf16_arithmetic_stays_near_the_published_weights(model: Path, ranks: Ranks, kind: tuple[str, int]) -> None:
    backend = opened(model, ranks, kind, precision="bf16")
    update(backend, micros())
    (micro,) = micros()
    wanted, _ = reference(model, backend.weights())(micro.tokens, micro.mask, micro.temperature, micro.lengths)
    away = (backend.logprobs(micro, gradient=False) - wanted).abs()[micro.mask]
    assert 0 < away.mean().item() <= 0.02


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_small_updates_add_up_in_the_masters(model: Path, ranks: Ranks, kind: tuple[str, int]) -> None:
    """Steps far below the spacing of bf16 must not be lost."""
    backend = opened(model, ranks, kind)
    before = flat(backend.weights())
    for _ in range(60):
        update(backend, micros(), lr=1e-5)
    moved = np.abs(flat(backend.weights()) - before)
    assert moved.max() > 2e-4
    assert (moved > 0).mean() > 0.5


def test_all_backends_go_the_same_way(model: Path, ranks: Ranks) -> None:
    ends = []
    for kind in [*KINDS, ("torch", 0)]:
        backend = opened(model, ranks, kind)
        norms = [update(backend, micros(64)) for _ in range(5)]
        ends.append((flat(backend.weights()), norms))
    start = flat(opened(model, ranks, ("torch", 0)).weights())
    first, norms = ends[0]
    for end, others in ends[1:]:
        a, b = first - start, end - start
        assert float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) > 0.999
        assert others == pytest.approx(norms, rel=1e-3)
    assert np.array_equal(first, ends[-1][0]), "plain torch is deterministic"


@pytest.mark.parametrize("kind", [("torch", 0), ("deepspeed", 1), ("deepspeed", 3)], ids=str)
@pytest.mark.parametrize("more", [{}, {"updates_per_batch": 2}], ids=["one update", "two updates"])
def test_the_result_does_not_depend_on_packing(
    model: Path, ranks: Ranks, kind: tuple[str, int], more: dict[str, int]
) -> None:
    ends, metrics = [], []
    for micro in (10_000, 40):
        config = make_config(
            model, model.parent, "r", backend=kind[0], zero_stage=kind[1], micro_batch_tokens=micro, **more
        )
        backend = open_backend(config.trainer_of("main"), str(model), ranks)
        metrics.append(train(config, backend, ranks, range(1, 4)))
        ends.append(flat(backend.weights()))
    assert (ends[0] != ends[1]).mean() < 0.01, "only roundings at a bf16 boundary may differ"
    assert np.abs(ends[0] - ends[1]).max() < 0.01
    for name, value in metrics[0].items():
        assert metrics[1][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loaded_state_goes_on_as_if_nothing_had_happened(
    model: Path, ranks: Ranks, kind: tuple[str, int], precision: str, tmp_path: Path
) -> None:
    backend = opened(model, ranks, kind, precision=precision)
    for _ in range(3):
        update(backend, micros())
    backend.save(tmp_path)
    saved = flat(backend.weights())
    update(backend, micros())
    wanted = flat(backend.weights())
    other = opened(model, ranks, kind, precision=precision)
    other.load(tmp_path)
    assert np.array_equal(flat(other.weights()), saved)
    update(other, micros())
    assert np.array_equal(flat(other.weights()), wanted)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_move_between_backends_and_stages(model: Path, ranks: Ranks, precision: str, tmp_path: Path) -> None:
    """Whoever wrote a state, everybody goes on from it with the same weights and the same next update."""
    ends = []
    for at, (writer, reader) in enumerate(zip(KINDS, KINDS[1:] + KINDS[:1], strict=True)):
        first = opened(model, ranks, writer, precision=precision)
        for _ in range(2):
            update(first, micros())
        (folder := tmp_path / str(at)).mkdir()
        first.save(folder)
        other = opened(model, ranks, reader, precision=precision)
        other.load(folder)
        assert np.array_equal(flat(other.weights()), flat(first.weights())), (writer, reader)
        norms = [update(backend, micros()) for backend in (first, other)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
        a, b = flat(first.weights()), flat(other.weights())
        assert np.abs(a - b).max() < 0.01 and (a != b).mean() < 0.05, (writer, reader)
        ends.append(a)


def test_a_folder_without_a_state_or_of_another_model_is_refused(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no state"):
        opened(model, ranks, ("torch", 0)).load(tmp_path)
    wider = make_model(tmp_path / "wider", hidden=64)
    for kind in (("torch", 0), ("deepspeed", 1)):
        (folder := tmp_path / kind[0]).mkdir()
        opened(wider, ranks, kind).save(folder)
        with pytest.raises(ConfigurationError, match="another model"):
            opened(model, ranks, kind).load(folder)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_gradient_that_is_not_finite_is_not_applied(model: Path, ranks: Ranks, kind: tuple[str, int]) -> None:
    backend = opened(model, ranks, kind)
    update(backend, micros())
    before = flat(backend.weights())
    (micro,) = micros()
    new = backend.logprobs(micro, gradient=True)
    backend.backward((new * float("inf")).sum(), last=True)
    assert not backend.step(1e-3).applied
    assert np.array_equal(flat(backend.weights()), before)
    update(backend, micros())
    assert np.isfinite(flat(backend.weights())).all()


def test_tied_weights_are_published_once(model: Path, ranks: Ranks) -> None:
    for kind in KINDS:
        names = list(opened(model, ranks, kind).weights())
        assert "model.embed_tokens.weight" in names
        assert "lm_head.weight" not in names


def test_an_unknown_backend_is_named(model: Path, ranks: Ranks) -> None:
    with pytest.raises(ConfigurationError, match="deepspeed, torch"):
        opened(model, ranks, ("jax", 0))
