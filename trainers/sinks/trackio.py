"""Metrics to Trackio: a local database with a dashboard (``trackio show``), or a Space when one is named."""

from collections.abc import Mapping
from typing import Any

from headrace.trainers.sinks.sink import RunInfo, required

__all__ = ("Trackio",)


class Trackio:
    """One Trackio run per policy; a resumed run goes on under the same name."""

    package = "trackio"

    def __init__(self, info: RunInfo, **more: Any) -> None:
        self._trackio = required("trackio", "trackio", "trackio")
        self._run: Any = self._trackio.init(
            project=info.project, name=info.name, config=dict(info.settings), resume="allow", embed=False, **more
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``Sink``."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """See ``Sink``."""
        self._run.finish()
