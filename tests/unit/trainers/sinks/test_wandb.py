"""W&B in offline mode: a run on disk that can be synced later, under one id for all sessions."""

import json
from pathlib import Path

import pytest

from headrace.trainers.sinks.sink import RunInfo
from headrace.trainers.sinks.wandb import WandB


def history(file: Path) -> list[tuple[int, float]]:
    """Steps and values of ``reward/mean`` in an offline run."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store, found = DataStore(), []
    store.open_for_scan(str(file))
    while data := store.scan_data():
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found.append((row.get("_step", record.history.step.num), row["reward/mean"]))
    return found


def test_an_offline_run_is_written_into_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    info = RunInfo(project="p", run="run-1", policy="main", folder=tmp_path, settings={"lr": 0.1})
    sink = WandB(info, mode="offline")
    sink.write(1, {"reward/mean": 0.25})
    sink.write(3, {"reward/mean": 0.5})
    assert sink._run.id == "run-1-main"
    sink.close()
    (log,) = (tmp_path / "wandb").rglob("*.wandb")
    assert history(log) == [(1, 0.25), (3, 0.5)]
