"""MLflow's file store holds every metric with its step; a resumed run is the same run."""

from pathlib import Path

import pytest

from headrace.trainers.sinks.mlflow import MLflow
from headrace.trainers.sinks.sink import RunInfo


def test_metrics_by_version_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="the extra 'mlflow' is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settings = {f"key{n}": "x" * 900 for n in range(130)}
    info = RunInfo(project="sort", run="r", policy="main", folder=tmp_path, settings=settings)
    first = MLflow(info)
    first.write(1, {"reward/mean": 0.25, "mismatch_kl": 0.01})
    second = MLflow(info)  # the first was killed
    second.write(2, {"reward/mean": 0.5})
    second.close()
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("sort")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5)]
    assert (run.info.run_name, run.info.status, len(run.data.params)) == ("r-main", "FINISHED", 130)
