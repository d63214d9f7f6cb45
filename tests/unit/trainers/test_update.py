"""One batch into one update: what is refused, what is reported, what is skipped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_probe import manifest_of
from trainer_feed import make_config, make_items, make_model

from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.backend import Backend
from headrace.trainers.backends.open import open_backend
from headrace.trainers.batching import pack, rows_of
from headrace.trainers.ranks import Ranks
from headrace.trainers.update import Learner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def opened(config: RunConfig) -> Backend:
    return open_backend(config.trainer_of("main"), config.policies["main"].model, Ranks())


def learner(model: Path, **trainer: Any) -> tuple[Learner, Backend]:
    config = make_config(model, model.parent, "r", **trainer)
    backend = opened(config)
    return Learner(config, "main", backend, Ranks()), backend


def bits(backend: Backend) -> np.ndarray:
    return np.concatenate([array.ravel() for array in backend.weights().values()])


def exact(backend: Backend) -> Any:
    """Behave log-probs as the present weights give them."""

    def logprobs(tokens: np.ndarray, prompt: int) -> np.ndarray:
        (item, *_) = make_items(1, groups=1, size=2, version=0, seed=0)
        mask = np.r_[np.zeros(prompt, np.uint8), np.ones(len(tokens) - prompt, np.uint8)]
        sequence = replace(
            item.sequences[0], tokens=tokens, mask=mask, logprobs=np.zeros(len(tokens), np.float32),
            versions=np.zeros(len(tokens), np.int32),
        )  # fmt: skip
        (micro,) = pack(rows_of([replace(item, sequences=[sequence])], lambda group: [0.0]), 10_000)
        return backend.logprobs(micro, gradient=False)[0].numpy()

    return logprobs


def test_data_of_the_present_weights_has_no_mismatch(model: Path) -> None:
    learn, backend = learner(model)
    items = make_items(1, groups=4, size=4, version=0, seed=0, behave=exact(backend))
    metrics = learn.train(items, manifest_of(1, items), 0).metrics
    assert 0 <= metrics["mismatch/logprob_abs_mean"] <= metrics["mismatch/logprob_abs_max"] <= 1e-5
    assert metrics["ratio/behave"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["behave_kl/k3"] == pytest.approx(0.0, abs=1e-5)


def test_tokens_of_other_versions_do_not_count_as_mismatch(model: Path) -> None:
    learn, _ = learner(model)
    items = make_items(3, groups=2, size=4, version=1, seed=0)
    metrics = learn.train(items, manifest_of(3, items), 2).metrics
    assert metrics["mismatch/logprob_abs_max"] == 0.0
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 1.0)


def test_metrics_of_a_batch(model: Path) -> None:
    learn, _ = learner(model, warmup_steps=4, lr=1e-3)
    items = make_items(2, groups=4, size=4, version=1, seed=0)
    learned = learn.train(items, manifest_of(2, items), 1)
    rewards = [item.shaped_reward for item in items]
    assert learned.metrics["reward/mean"] == pytest.approx(np.mean(rewards))
    assert learned.metrics["seq_len/mean"] == pytest.approx(np.mean([item.length for item in items]))
    assert learned.metrics["optim/lr"] == pytest.approx(0.5e-3)
    assert learned.metrics["optim/grad_norm"] > 0
    assert learned.updates == 1


def test_more_updates_clip_against_the_start_of_the_step(model: Path) -> None:
    once, _ = learner(model, lr=0.05)
    often, _ = learner(model, lr=0.05, updates_per_batch=2, epochs=3)
    items = make_items(1, groups=4, size=4, version=0, seed=0)
    first = once.train(items, manifest_of(1, items), 0)
    second = often.train(items, manifest_of(1, items), 0)
    assert (first.updates, second.updates) == (1, 6)
    assert first.metrics["clip_fraction"] == first.metrics["prox_kl"] == 0.0
    assert second.metrics["clip_fraction"] > 0
    assert second.metrics["prox_kl"] != 0


def test_a_batch_without_a_trained_token_changes_nothing(model: Path) -> None:
    learn, backend = learner(model)
    before = bits(backend)
    items = [replace(item, sequences=[]) for item in make_items(1, groups=1, size=2, version=0, seed=0)]
    learned = learn.train(items, replace(manifest_of(1, items), tokens=0, sequences=0), 0)
    assert learned.updates == 0
    assert np.array_equal(bits(backend), before)
    learned = learn.train([], replace(manifest_of(1, []), tokens=0, sequences=0), 0)
    assert learned.updates == 0


def test_an_empty_sequence_and_one_that_is_not_trained_cost_nothing(model: Path) -> None:
    """Also where each would be a micro-batch of its own."""
    items = make_items(1, groups=2, size=4, version=0, seed=0)
    (sequence,) = items[0].sequences
    none = {name: getattr(sequence, name)[:0] for name in ("tokens", "logprobs", "mask", "versions")}
    silent = replace(sequence, mask=np.zeros_like(sequence.mask))
    more = [replace(items[0], sequences=[replace(sequence, **none), sequence, silent]), *items[1:]]
    ends = []
    for given in (items, more):
        learn, backend = learner(model, micro_batch_tokens=1, updates_per_batch=2)
        assert learn.train(given, manifest_of(1, items), 0).updates == 2
        ends.append(bits(backend))
    assert np.array_equal(*ends)


def test_a_sequence_with_a_token_that_the_model_does_not_have_is_as_if_it_were_not_there(model: Path) -> None:
    items = make_items(1, groups=2, size=4, version=0, seed=0)
    (sequence,) = items[0].sequences
    ends = []
    for foreign in (replace(sequence, tokens=sequence.tokens + 100), replace(sequence, trainable=False)):
        learn, backend = learner(model)
        learned = learn.train([replace(items[0], sequences=[foreign]), *items[1:]], manifest_of(1, items), 0)
        ends.append((bits(backend), learned.metrics["batch/left_out"]))
    assert np.array_equal(ends[0][0], ends[1][0]) and [count for _, count in ends] == [1.0, 0.0]


def test_a_penalty_holds_to_the_first_weights(model: Path) -> None:
    learn, _ = learner(model, loss="grpo", loss_options={"kl_weight": 0.5})
    items = make_items(1, groups=2, size=4, version=0, seed=0)
    first = learn.train(items, manifest_of(1, items), 0).metrics["ref_kl"]
    second = learn.train(items, manifest_of(1, items), 0).metrics["ref_kl"]
    assert first == pytest.approx(0.0, abs=1e-9)
    assert second > 0


LIKE_PPO = ("ppo", "grpo", "decoupled_ppo", "dapo", "cispo", "m2po", "reinforce", "gspo")


@pytest.mark.parametrize("updates", [1, 4])
def test_losses_part_from_the_second_update_on(model: Path, updates: int) -> None:
    """On data of the present weights; one update is the same for all, four differ where the formulas do."""
    ends = {}
    for name in LIKE_PPO:
        learn, backend = learner(model, loss=name, updates_per_batch=updates, lr=0.02, depth=0, max_grad_norm=0.0)
        items = make_items(1, groups=4, size=4, version=0, seed=0, behave=exact(backend))
        learned = learn.train(items, manifest_of(1, items), 0)
        assert learned.updates == updates
        ends[name] = bits(backend)
    alike = {name for name in LIKE_PPO if (ends[name] != ends["ppo"]).mean() < 0.02}
    if updates == 1:
        assert alike == set(LIKE_PPO), "only roundings at a bf16 boundary may differ"
    else:
        assert {"grpo", "decoupled_ppo"} <= alike and not {"cispo", "reinforce", "gspo", "m2po"} & alike


@pytest.mark.parametrize(("unit", "weight"), [("trajectory", 0.5), ("sequence", 3 / 4)])
def test_a_trajectory_of_three_sequences_weighs_one_or_three(model: Path, unit: str, weight: float) -> None:
    """The loss of one update of plain policy gradient on two trajectories, by hand."""
    options = {"correction": {"action": "off"}}
    given = {"loss": "reinforce", "loss_options": options, "advantage": "dr", "aggregation": "seq-mean-token-mean"}
    learn, backend = learner(model, depth=0, aggregation_unit=unit, **given)
    first, second = make_items(1, groups=1, size=2, version=0, seed=0)
    items = [replace(first, sequences=first.sequences * 3), second]
    rows = [rows_of([item], lambda group: [1.0]) for item in (first, second)]
    means = []
    for row in rows:
        (micro,) = pack(row, 10_000)
        means.append(float(backend.logprobs(micro, gradient=False)[micro.mask].mean()))
    gains = [item.shaped_reward - item.group_mean for item in (first, second)]
    wanted = -(weight * gains[0] * means[0] + (1 - weight) * gains[1] * means[1])
    assert learn.train(items, manifest_of(1, items), 0).loss == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("method", ["loglinear", "linear", "behave"])
def test_prox_may_be_approximated(model: Path, method: str) -> None:
    """Without a forward pass before the first update: of data sampled by the present weights it is behave."""
    learn, backend = learner(model, prox=method, updates_per_batch=2, lr=0.05)
    items = make_items(1, groups=4, size=4, version=0, seed=0, behave=exact(backend))
    calls = []
    real = backend.logprobs
    backend.logprobs = lambda micro, *, gradient: calls.append(micro) or real(micro, gradient=gradient)  # type: ignore[func-returns-value,method-assign]
    metrics = learn.train(items, manifest_of(1, items), 0).metrics
    assert not calls and metrics["correction/weight"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["prox_kl"] != 0


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"trainer": {"loss": "ppo", "loss_options": {"correction": {"action": "off"}}}}, "does not correct"),
        ({"trainer": {"loss": "tis", "loss_options": {"correction": {"action": "off"}}}}, "switch its correction on"),
        ({"trainer": {"loss": "reinforce", "loss_options": {"anchor": "behave"}}}, "so data may be 1 versions old"),
        ({"trainer": {"loss_options": {"behave": {"action": "off"}}}}, "decoupled_ppo as configured does not correct"),
        ({"trainer": {"loss_options": {"correction": {"upper": 3}}}}, "calls the correction `behave`"),
        ({"trainer": {"loss_options": {"behave": {"upper": 0}}}}, "loss_options.behave.upper"),
        ({"trainer": {"loss": "pop"}}, "did you mean 'ppo'"),
        ({"trainer": {"advantage": "gruop"}}, "did you mean 'group'"),
        ({"trainer": {"aggregation": "mean"}}, "token-mean"),
        ({"trainer": {"loss_options": {"cap": 3}}}, "loss_options.cap"),
        ({"rollout": {"top_p": 0.9}}, "top_p"),
    ],
)
def test_what_cannot_be_right_is_refused(model: Path, over: dict[str, Any], message: str) -> None:
    config = make_config(model, model.parent, "r")
    data = config.model_dump()
    for section, values in over.items():
        data[section] |= values
    with pytest.raises(ConfigurationError, match=message):
        Learner(RunConfig.model_validate(data), "main", opened(config), Ranks())


def test_synchronous_data_needs_no_correction(model: Path) -> None:
    config = make_config(model, model.parent, "r", depth=0, loss_options={"behave": {"action": "off"}})
    Learner(config, "main", opened(config), Ranks())


def test_the_seed_alone_decides(model: Path) -> None:
    """Two trainers on the same batches end with the same bits."""
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        learn, backend = learner(model, depth=0)
        for batch in range(1, 5):
            items = make_items(batch, groups=4, size=4, version=batch - 1, seed=0)
            learn.train(items, manifest_of(batch, items), batch - 1)
        ends.append(bits(backend))
    assert np.array_equal(*ends)
