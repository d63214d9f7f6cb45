"""Figures of a whole update and of a whole batch, and a critic, across processes under DeepSpeed."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from trainer_feed import make_model

SETTINGS: dict[str, Any] = {
    "loss": "m2po", "loss_options": {"variant": "official", "budget": 0.01}, "advantage": "gae",
    "critic": {"lr": 3e-3}, "updates_per_batch": 2, "lr": 3e-4,
}  # fmt: skip


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("logs"))
    yield nursery
    nursery.close()


def trained(nursery: Nursery, model: Path, out: Path, kind: tuple[str, int], ranks: int) -> dict[str, float]:
    """The metrics of the last of three batches; with two ranks one has a single group of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "PROBE_TRAINER": json.dumps(SETTINGS),
    }  # fmt: skip
    arguments = [str(model), str(out), kind[0], str(kind[1]), "fp32", "3", "40"]
    own = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    for process in [nursery.start(*arguments, program="probe", environment=e) for e in own]:
        assert process.wait(280) == 0, process.log()
    metrics: dict[str, float] = json.loads(out.with_suffix(".json").read_text())
    return metrics


@pytest.fixture(scope="module")
def alone(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A model, and what one process on plain torch gives."""
    folder = tmp_path_factory.mktemp("alone")
    model = make_model(folder / "m")
    return model, trained(nursery, model, folder / "one.npz", ("torch", 0), 1)


@pytest.mark.parametrize("kind", [("torch", 0), ("deepspeed", 1), ("deepspeed", 3)], ids=str)
def test_two_processes_find_the_same_figures_as_one(
    nursery: Nursery, tmp_path: Path, alone: tuple[Path, dict[str, float]], kind: tuple[str, int]
) -> None:
    model, wanted = alone
    found = trained(nursery, model, tmp_path / "two.npz", kind, 2)
    for name, value in wanted.items():
        if name.startswith(("m2po/", "critic/", "advantage/", "mismatch/", "behave_kl/")) or name in ("loss", "ess"):
            assert found[name] == pytest.approx(value, rel=2e-2, abs=1e-3), name
