"""W&B in offline mode: a run on disk that can be synced later, under one id for all sessions."""

from pathlib import Path

import pytest

from headrace.trainers.sinks.sink import RunInfo
from headrace.trainers.sinks.wandb import WandB


def test_an_offline_run_is_written_into_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    info = RunInfo(project="p", run="run-1", policy="main", folder=tmp_path, settings={"lr": 0.1})
    sink = WandB(info, mode="offline")
    sink.write(1, {"reward/mean": 0.25})
    sink.write(3, {"reward/mean": 0.5})
    assert sink._run.id == "run-1-main"
    sink.close()
    (log,) = (tmp_path / "wandb").rglob("*.wandb")
    data = log.read_bytes()
    assert data.count(b"reward/mean") >= 2 and b"0.25" in data, "two versions with their values"
