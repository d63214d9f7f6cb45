"""A batch trained by one rank in one micro-batch, or by several ranks in many, ends with the same weights and figures.

The ranks are threads of this process with a model each; losses with figures of a whole update, advantages with figures
of a whole batch, and a critic are among what is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_probe import manifest_of
from thread_ranks import ThreadRanks, ranks_of, together
from trainer_feed import make_config, make_items, make_model

from headrace.schemas.config import RunConfig
from headrace.schemas.records import Item
from headrace.trainers.backends.backend import Backend
from headrace.trainers.backends.open import open_backend
from headrace.trainers.update import Learned, Learner

SETTINGS: dict[str, dict[str, Any]] = {
    "m2po": {"loss": "m2po", "loss_options": {"budget": 0.02}},
    "m2po areal, two updates": {
        "loss": "m2po", "loss_options": {"variant": "areal", "budget": 0.5}, "updates_per_batch": 2, "epochs": 2,
    },
    "normalised sequence weights": {
        "loss": "tis", "loss_options": {"correction": {"level": "sequence", "product": True, "normalize": True}},
        "aggregation": "seq-mean-token-mean",
    },
    "gspo, rejection": {
        "loss": "gspo", "aggregation": "seq-mean-token-mean", "advantage": "mixed", "updates_per_batch": 2,
        "loss_options": {"reject": [{"level": "sequence", "metric": "k3_behave", "upper": 2.0}]},
    },
    "whitened returns with a penalty": {
        "advantage": "reinforce_pp_baseline", "advantage_options": {"kl_weight": 0.1, "gamma": 0.9},
        "aggregation": "seq-mean-token-sum",
    },
    "a critic": {"advantage": "gae", "loss": "ppo", "updates_per_batch": 2, "critic": {"lr": 1e-2}},
    "prox without a forward pass": {"prox": "loglinear", "epochs": 3, "loss_options": {"clip_high": 0.05}},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def behave(tokens: np.ndarray, prompt: int) -> np.ndarray:
    """Log-probs of a policy that differs from ours, here more and there less."""
    return (-2.9 + 0.5 * np.sin(tokens)).astype(np.float32)


def batch(number: int) -> list[Item]:
    return make_items(number, groups=5, size=3, version=number - 1, seed=7, behave=behave)


def flat(backend: Backend) -> np.ndarray:
    bits = np.concatenate([array.ravel() for array in backend.weights().values()])
    return (bits.astype(np.uint32) << 16).view(np.float32)


def trained(config: RunConfig, ranks: Sequence[ThreadRanks], owner: Sequence[int]) -> tuple[list[Learned], np.ndarray]:
    """Two batches on these ranks; group g of a batch is trained by rank owner[g]."""
    folder = config.policies["main"].model
    backends = [open_backend(config.trainer_of("main"), folder, one) for one in ranks]
    learners = [Learner(config, "main", b, one) for b, one in zip(backends, ranks, strict=True)]

    def work(one: ThreadRanks) -> list[Learned]:
        out = []
        for number in (1, 2):
            items = batch(number)
            mine = [item for item in items if owner[item.group % 1000] == one.rank]
            out.append(learners[one.rank].train(mine, manifest_of(number, items), number - 1))
        return out

    (learned, *others) = together(ranks, work)
    ends = [flat(backend) for backend in backends]
    for other, end in zip(others, ends[1:], strict=True):
        assert [x.updates for x in other] == [x.updates for x in learned]
        assert np.array_equal(end, ends[0]), "ranks hold the same weights"
    return learned, ends[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_micro_batches_and_ranks_change_nothing(model: Path, name: str) -> None:
    ways = [((0, 0, 0, 0, 0), 10_000), ((0, 1, 0, 1, 1), 30), ((2, 0, 2, 2, 0), 18)]
    found = []
    for owner, tokens in ways:
        config = make_config(model, model.parent, "r", micro_batch_tokens=tokens, lr=1e-3, **SETTINGS[name])
        found.append(trained(config, ranks_of(max(owner) + 1), owner))
    first, weights = found[0]
    for learned, end in found[1:]:
        for one, other in zip(first, learned, strict=True):
            assert other.loss == pytest.approx(one.loss, rel=1e-3, abs=1e-5)
            assert set(other.metrics) == set(one.metrics)
            for key, value in one.metrics.items():
                assert other.metrics[key] == pytest.approx(value, rel=5e-3, abs=1e-4), key
        assert (end != weights).mean() < 0.05, "only roundings at a bf16 boundary may differ"
        assert np.abs(end - weights).max() < 0.02


def test_a_bound_is_found_with_one_forward_pass_more(model: Path) -> None:
    """And with none where a rank has one micro-batch, or prox is at hand before the first update."""
    calls = {}
    for tokens, more in ((10_000, {}), (25, {}), (25, {"updates_per_batch": 2})):
        config = make_config(model, model.parent, "r", micro_batch_tokens=tokens, loss="m2po", **more)
        (rank,) = ranks_of(1)
        backend = open_backend(config.trainer_of("main"), str(model), rank)
        counts = {"scores": 0, "logprobs": 0}
        for method in counts:
            real = getattr(backend, method)

            def counted(micro: Any, *, gradient: bool, real: Any = real, method: str = method) -> Any:
                counts[method] += 1  # noqa: B023 (called within this turn of the loop)
                return real(micro, gradient=gradient)

            setattr(backend, method, counted)
        items = batch(1)
        Learner(config, "main", backend, rank).train(items, manifest_of(1, items), 0)
        calls[tokens, len(more)] = (counts["scores"], counts["logprobs"])
    with_gradient, before = calls[10_000, 0]
    assert (with_gradient, before) == (1, 0)
    scores, logprobs = calls[25, 0]
    micros = logprobs
    assert micros > 1 and scores == 2 * micros, "log-probs are scores without the entropy"
    scores, logprobs = calls[25, 1]
    assert logprobs > micros, "prox of both updates, and a survey of the second"
