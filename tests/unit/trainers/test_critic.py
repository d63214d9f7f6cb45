"""The critic of PPO: it learns the returns, moves beside the policy, and is saved and taken up with it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_probe import manifest_of
from trainer_feed import make_config, make_items, make_model

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Item
from headrace.trainers.backends.backend import Backend, Snapshots
from headrace.trainers.backends.open import open_backend
from headrace.trainers.ranks import Ranks
from headrace.trainers.update import Learner

GAE: dict[str, Any] = {"advantage": "gae", "loss": "ppo", "critic": {"lr": 1e-2, "clip": 0.0}, "lr": 1e-4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def learner(model: Path, **trainer: Any) -> tuple[Learner, Backend]:
    config = make_config(model, model.parent, "r", **{**GAE, **trainer})
    backend = open_backend(config.trainer_of("main"), str(model), Ranks())
    return Learner(config, "main", backend, Ranks()), backend


def batch(number: int = 1) -> list[Item]:
    return make_items(number, groups=4, size=4, version=number - 1, seed=0)


def bits(backend: Backend) -> np.ndarray:
    return np.concatenate([array.ravel() for array in backend.weights().values()])


def test_values_come_to_explain_the_returns(model: Path) -> None:
    learn, _ = learner(model)
    found = [learn.train(batch(), manifest_of(1, batch()), 0).metrics for _ in range(40)]
    assert found[0]["critic/value"] == pytest.approx(0.0, abs=1e-3), "a fresh critic knows nothing"
    assert found[0]["critic/explained_variance"] <= 0.05
    assert found[-1]["critic/loss"] < 0.5 * found[0]["critic/loss"]
    assert found[-1]["critic/explained_variance"] > 0.3
    assert found[-1]["critic/grad_norm"] > 0


def test_the_first_batches_may_teach_the_critic_alone(model: Path) -> None:
    learn, backend = learner(model, critic={"lr": 1e-2, "alone": 2})
    before = bits(backend)
    losses = []
    for number in (1, 2, 3):
        items = batch(number)
        learned = learn.train(items, manifest_of(number, items), number - 1)
        losses.append(learned.metrics["critic/loss"])
        assert learned.updates == (0 if number < 3 else 1)
        assert np.array_equal(bits(backend), before) == (number < 3)
        assert "ess" in learned.metrics, "the policy's figures are still reported"
    assert losses[1] != losses[0]


def test_a_saved_pair_goes_on_as_if_nothing_had_happened(model: Path, tmp_path: Path) -> None:
    learn, backend = learner(model)
    items = batch()
    for _ in range(2):
        learn.train(items, manifest_of(1, items), 0)
    state = learn.state
    assert isinstance(state, Snapshots)
    part = state.snapshot()
    wanted = [learn.train(items, manifest_of(1, items), 0).metrics for _ in range(2)]
    part.write(tmp_path)  # as it was when it was copied
    other, again = learner(model)
    other.state.load(tmp_path)
    found = [other.train(items, manifest_of(1, items), 0).metrics for _ in range(2)]
    assert found == wanted
    assert np.array_equal(bits(again), bits(backend))


def test_saving_without_a_copy_is_the_same(model: Path, tmp_path: Path) -> None:
    learn, _ = learner(model)
    learn.train(batch(), manifest_of(1, batch()), 0)
    learn.state.save(tmp_path)
    other, _ = learner(model)
    other.state.load(tmp_path)
    pair = [one.train(batch(), manifest_of(1, batch()), 0).metrics for one in (learn, other)]
    assert pair[0] == pair[1]


def test_a_checkpoint_without_a_critic_is_named(model: Path, tmp_path: Path) -> None:
    config = make_config(model, model.parent, "r")
    backend = open_backend(config.trainer_of("main"), str(model), Ranks())
    plain = Learner(config, "main", backend, Ranks())
    assert plain.state is backend, "without a critic nothing is wrapped"
    plain.state.save(tmp_path)
    with pytest.raises(ConfigurationError, match="holds no critic"):
        learner(model)[0].state.load(tmp_path)


def test_what_has_no_critic_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        learner(model, critic={"model": str(tmp_path)})
    config = make_config(model, model.parent, "r", **GAE)
    backend = open_backend(config.trainer_of("main"), str(model), Ranks())
    config = make_config(model, model.parent, "r", ranks=2, sequence_parallel=2, **GAE)
    with pytest.raises(ConfigurationError, match="sequence_parallel"):
        Learner(config, "main", backend, Ranks(0, 2, sharing=2))


def test_a_critic_of_deepspeed_learns_as_one_of_plain_torch(model: Path, ranks: Ranks) -> None:
    found = {}
    for backend in ("torch", "deepspeed"):
        config = make_config(model, model.parent, "r", backend=backend, **GAE)
        policy = open_backend(config.trainer_of("main"), str(model), ranks)
        learn = Learner(config, "main", policy, ranks)
        found[backend] = [learn.train(batch(), manifest_of(1, batch()), 0).metrics for _ in range(3)][-1]
    for name in ("critic/loss", "critic/value", "critic/return", "critic/grad_norm"):
        assert found["deepspeed"][name] == pytest.approx(found["torch"][name], rel=2e-2, abs=1e-4), name
