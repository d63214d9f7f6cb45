"""Metrics to MLflow: a tracking server, or files in the run folder when none is named."""

import os
import time
from collections.abc import Mapping
from typing import Any

from headrace.trainers.sinks.sink import RunInfo, required

__all__ = ("MLflow",)

_TAG = "headrace.run"
_MOST_PARAMS, _LONGEST_PARAM = 100, 500


class MLflow:
    """One MLflow run per policy in the experiment named like the project; found again by a tag when it is resumed.

    tracking_uri: of the server; empty: as MLFLOW_TRACKING_URI says, else ``<run folder>/mlruns``.
    """

    package = "mlflow"

    def __init__(self, info: RunInfo, *, tracking_uri: str = "") -> None:
        required("mlflow", "mlflow", "mlflow")
        tracking = required("mlflow.tracking", "mlflow", "mlflow")
        self._entities: Any = required("mlflow.entities", "mlflow", "mlflow")
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            uri = (info.folder / "mlruns").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without it MLflow 3 refuses plain files
        self._client: Any = tracking.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(info.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(info.project)
        found = self._client.search_runs([number], filter_string=f"tags.`{_TAG}` = '{info.name}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(number, run_name=info.name, tags={_TAG: info.name}).info.run_id
        params = [
            self._entities.Param(key, str(value)[:_LONGEST_PARAM]) for key, value in sorted(info.settings.items())
        ]
        for at in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _MOST_PARAMS])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``Sink``."""
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        )

    def close(self) -> None:
        """See ``Sink``."""
        self._client.set_terminated(self._id)
