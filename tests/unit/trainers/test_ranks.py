"""Two ranks with skewed lanes do what one process does."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nursery import Nursery, Trainer
from tiny_models import make_family
from trainer_feed import make_model

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.ranks import Ranks


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("logs"))
    yield nursery
    nursery.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
STEPS = 10
"""Batches; each has two updates."""


def start(
    nursery: Nursery, model: Path, out: Path, kind: tuple[str, int], ranks: int, precision: str = "fp32", **more: Any
) -> list[Trainer]:
    """Train ``STEPS`` batches of two updates on ``ranks`` processes with the environment that torchrun gives."""
    options = {"options": SHARDED} if kind == ("deepspeed", 3) else {}
    shared = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PROBE_TRAINER": json.dumps({"updates_per_batch": 2, "lr": 3e-4, **options, **more}),
    }
    arguments = [str(model), str(out), kind[0], str(kind[1]), precision, str(STEPS), "40"]
    own = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [nursery.start(*arguments, program="probe", environment=e) for e in own]


def ended(processes: list[Trainer], out: Path) -> dict[str, float]:
    """Wait for the ranks; the last metrics."""
    for process in processes:
        assert process.wait(280) == 0, process.log()
    metrics: dict[str, float] = json.loads(out.with_suffix(".json").read_text())
    return metrics


def bf16(path: Path) -> np.ndarray:
    with np.load(path) as file:
        bits = np.concatenate([file[name].ravel() for name in sorted(file.files)])
    return (bits.astype(np.uint32) << 16).view(np.float32)


def gradient(path: Path) -> np.ndarray:
    with np.load(path.with_suffix(".gradient.npz")) as file:
        return np.concatenate([file[name].ravel() for name in sorted(file.files)])


def assert_same_run(out: Path, other: Path, metrics: dict[str, float], wanted: dict[str, float], near: float) -> None:
    """Gradients agree to ``near``, parameters after all steps to the rounding of bf16, metrics nearly."""
    mine, theirs = gradient(out), gradient(other)
    assert np.linalg.norm(mine - theirs) < near * np.linalg.norm(theirs)
    first, second = bf16(out), bf16(other)
    moved = STEPS * 2 * 3e-4
    assert np.abs(first - second).max() < 0.1 * moved + 0.01
    assert (first != second).mean() < (0.05 if near < 1e-3 else 0.5), "only roundings at a bf16 boundary may differ"
    assert np.linalg.norm(first - second) < 2e-3 * np.linalg.norm(second)
    if near < 1e-3:
        for name in ("loss", "optim/grad_norm", "reward/mean", "seq_len/mean", "staleness/max"):
            assert metrics[name] == pytest.approx(wanted[name], rel=5e-3, abs=1e-4), name
        assert set(metrics) == set(wanted)


@pytest.fixture(scope="module")
def alone(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, float]]:
    """A model, the weights of one process that trained it on plain torch, and its last metrics."""
    folder = tmp_path_factory.mktemp("alone")
    model, out = make_model(folder / "m"), folder / "one.npz"
    return model, out, ended(start(nursery, model, out, ("torch", 0), 1), out)


@pytest.mark.parametrize("kind", [("torch", 0), *(("deepspeed", stage) for stage in range(4))], ids=str)
def test_one_and_two_ranks_with_skewed_lanes_do_the_same(
    nursery: Nursery, tmp_path: Path, alone: tuple[Path, Path, dict[str, float]], kind: tuple[str, int]
) -> None:
    model, weights, metrics = alone
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.npz"
        found = ended(start(nursery, model, out, kind, ranks), out)
        assert found.pop("sharded") == float(kind[1] == 3 and ranks == 2)
        assert found.pop("shards_equal") == 1.0
        assert_same_run(out, weights, found, {k: v for k, v in metrics.items() if k in found}, 1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_in_bf16_stay_near_one(
    nursery: Nursery, tmp_path: Path, alone: tuple[Path, Path, dict[str, float]], stage: int
) -> None:
    model, weights, metrics = alone
    out = tmp_path / "two.npz"
    found = ended(start(nursery, model, out, ("deepspeed", stage), 2, "bf16"), out)
    assert found["shards_equal"] == 1.0
    assert_same_run(out, weights, found, metrics, 0.05)


@pytest.mark.parametrize("kind", [("torch", 0), ("deepspeed", 3)], ids=str)
def test_ranks_that_share_sequences_do_what_one_does(
    nursery: Nursery, tmp_path: Path, alone: tuple[Path, Path, dict[str, float]], kind: tuple[str, int]
) -> None:
    model, weights, metrics = alone
    out = tmp_path / "shared.npz"
    found = ended(start(nursery, model, out, kind, 2, sequence_parallel=2), out)
    assert found.pop("sharded") == float(kind[1] == 3)
    found.pop("shards_equal")
    assert_same_run(out, weights, found, {k: v for k, v in metrics.items() if k in found}, 1e-4)


def test_experts_that_run_on_some_ranks_only_do_not_hang(nursery: Nursery, tmp_path: Path) -> None:
    """Rank 1 has other tokens, so other experts run there; ZeRO 3 gathers the block whole."""
    model = make_family(tmp_path / "m", "Qwen3Moe", num_experts=8, num_experts_per_tok=1)
    leaf = {"moe_leaf_modules": ["Qwen3MoeSparseMoeBlock"]}
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    runs = [start(nursery, model, one, ("torch", 0), 1), start(nursery, model, two, ("deepspeed", 3), 2, **leaf)]
    wanted, found = (ended(run, out) for run, out in zip(runs, (one, two), strict=True))
    assert found.pop("shards_equal") == 1.0
    mine, theirs = gradient(two), gradient(one)
    assert np.linalg.norm(mine - theirs) < 1e-4 * np.linalg.norm(theirs)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=0.05, abs=0.01)


def test_ranks_that_cannot_be_divided_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigurationError, match=r"sequence_parallel 2 does not divide the 3 ranks"):
        Ranks.from_environment(sharing=2)


def test_neighbours_have_the_same_data_and_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Ranks(rank, 4, sharing=2) for rank in range(4)]
    assert [(r.data_rank, r.data_size) for r in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    monkeypatch.setattr(ranks[0], "gather", lambda value: [{"a": 1.0}, {"a": 1.0}, {"a": 2.0}, {"a": 2.0}])
    assert ranks[0].add_up({}) == {"a": 3.0}
    assert Ranks().neighbours() is None


def test_alone_every_collective_is_the_identity() -> None:
    ranks = Ranks()
    assert ranks.leads
    assert ranks.broadcast("x") == "x"
    assert ranks.gather(3) == [3]
    assert ranks.add_up({"a": 1.0}) == ranks.largest({"a": 1.0}) == {"a": 1.0}
