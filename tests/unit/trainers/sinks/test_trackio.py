"""Trackio keeps a local database that reads back what was logged."""

from pathlib import Path

import pytest

from headrace.trainers.sinks.sink import RunInfo
from headrace.trainers.sinks.trackio import Trackio


def test_metrics_are_in_the_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio", reason="the extra 'trackio' is not installed")
    sink = Trackio(RunInfo(project="p", run="run-1", policy="main", folder=tmp_path, settings={"lr": 0.1}))
    sink.write(1, {"reward/mean": 0.25})
    sink.write(2, {"reward/mean": 0.5})
    sink.close()
    import trackio

    found = trackio.Api().runs("p")
    assert [run.name for run in found] == ["run-1-main"]
