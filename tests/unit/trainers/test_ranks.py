"""Two ranks with skewed lanes do what one process does."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from nursery import Nursery
from trainer_feed import make_model

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


def probe(
    nursery: Nursery, model: Path, out: Path, backend: str, stage: int, ranks: int, **trainer: object
) -> dict[str, float]:
    """Train three batches on ``ranks`` processes with the environment that torchrun gives; the last metrics."""
    shared = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PROBE_TRAINER": json.dumps({"updates_per_batch": 2, **trainer}),
    }
    arguments = [str(model), str(out), backend, str(stage), "fp32", "3", "40"]
    own = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    processes = [nursery.start(*arguments, program="probe", environment=e) for e in own]
    for process in processes:
        assert process.wait(240) == 0, process.log()
    metrics: dict[str, float] = json.loads(out.with_suffix(".json").read_text())
    return metrics


def bf16(path: Path) -> np.ndarray:
    with np.load(path) as file:
        bits = np.concatenate([file[name].ravel() for name in sorted(file.files)])
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(scope="module")
def alone(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, float]]:
    """A model, the weights of one process that trained it, and its last metrics."""
    folder = tmp_path_factory.mktemp("alone")
    model = make_model(folder / "m")
    return model, folder / "one.npz", probe(nursery, model, folder / "one.npz", "torch", 0, 1)


@pytest.mark.parametrize(("backend", "stage"), [("torch", 0), ("deepspeed", 1), ("deepspeed", 3)])
def test_two_ranks_equal_one(
    nursery: Nursery, tmp_path: Path, alone: tuple[Path, Path, dict[str, float]], backend: str, stage: int
) -> None:
    model, weights, metrics = alone
    shards = {"options": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}} if stage == 3 else {}
    two = probe(nursery, model, tmp_path / "two.npz", backend, stage, 2, **shards)
    for name, value in metrics.items():
        assert two[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
    first, second = bf16(weights), bf16(tmp_path / "two.npz")
    assert (first != second).mean() < 0.02, "only roundings at a bf16 boundary may differ"
    assert np.abs(first - second).max() < 0.01


def test_alone_every_collective_is_the_identity() -> None:
    ranks = Ranks()
    assert ranks.leads
    assert ranks.broadcast("x") == "x"
    assert ranks.gather(3) == [3]
    assert ranks.add_up({"a": 1.0}) == ranks.largest({"a": 1.0}) == {"a": 1.0}
