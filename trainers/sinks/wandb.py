"""Metrics to Weights & Biases, online or (``mode = "offline"``) as files in the run folder for a later sync."""

import re
from collections.abc import Mapping
from typing import Any

from headrace.trainers.sinks.sink import RunInfo, required

__all__ = ("WandB",)


class WandB:
    """One W&B run per policy; a resumed run goes on under the same id. The key comes from the environment.

    mode: online, offline or disabled; empty: as WANDB_MODE says. entity: whose project it is.
    """

    package = "wandb"

    def __init__(self, info: RunInfo, *, mode: str = "", entity: str = "", **more: Any) -> None:
        wandb = required("wandb", "wandb", "wandb")
        self._run: Any = wandb.init(
            project=info.project,
            entity=entity or None,
            name=info.name,
            id=re.sub(r"[^A-Za-z0-9_-]", "-", info.name),
            resume="allow",
            dir=str(info.folder),
            config=dict(info.settings),
            mode=mode or None,
            **more,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``Sink``."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """See ``Sink``."""
        self._run.finish()
