"""The workflow ``verifiers``: environments written for Prime Intellect's library of that name play the episodes.

Goes in: a task whose prompt came through the dataset plug-in ``verifiers``; comes out: a trajectory of all that the
environment sampled through the capture endpoint, with the environment's own rewards and metrics. The library and the
environment live in a process beside the worker, which imports neither.
"""

import json
import math
from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.connectors.verifiers import COLUMN
from headrace.pipeline.capture.episode import CapturedEpisode
from headrace.pipeline.capture.verifiers_host import VerifiersHost
from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.captured import Captured, CapturedOptions, Outcome
from headrace.pipeline.workflows.workflow import EpisodeFailed, Scoring
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Reward
from headrace.schemas.records import Task

__all__ = ("Verifiers", "VerifiersOptions")


class VerifiersOptions(CapturedOptions):
    """Options of ``verifiers``."""

    environment: str
    """The description that the stream names as its dataset."""
    reward: Literal["environment", "stream", "both"] = "environment"
    """The environment's rewards, the stream's of the last reply, or both added."""
    start_seconds: float = Field(300.0, gt=0)
    """Time for the environment's process to import and make it."""


class Verifiers(Captured):
    """A package for verifiers plays. Raises ConfigurationError for a description that is not there."""

    Options = VerifiersOptions
    who = "the environment"

    def __init__(self, options: VerifiersOptions) -> None:
        super().__init__(options)
        self._options = options
        path = Path(options.environment)
        if not path.is_file():
            raise ConfigurationError(f"workflow verifiers: there is no description {path}; see docs/environments.md")
        self._host = VerifiersHost(path, start_seconds=options.start_seconds)

    async def play(self, task: Task, episode: CapturedEpisode, url: str, key: str, rewards: Scoring) -> Outcome:
        """Play the row that the prompt carries. Raises EpisodeFailed for what the environment could not do."""
        played = await self._host.play(_row(task), url)
        if played.error:
            raise EpisodeFailed(f"{self.who}: {played.error}")
        self.sampled(episode)
        text = played.completion or episode.last_text
        parts = []
        if self._options.reward != "stream":
            parts += [Reward(name=name, value=value) for name, value in played.rewards.items()]
        if self._options.reward != "environment":
            last = episode.last
            assert last is not None
            parts += await rewards.score(task.prompt, Completion(text, last.end_reason, last.ids))
        if not all(math.isfinite(part.value) for part in parts):
            raise EpisodeFailed(f"{self.who} gave rewards that are not finite: {dict(played.rewards)}")
        metrics = {name: value for name, value in played.metrics.items() if math.isfinite(value)}
        return Outcome(completion=text, rewards=parts, metrics=metrics)

    async def close(self) -> None:
        """End the environment's process and the endpoint."""
        await self._host.close()
        await super().close()


def _row(task: Task) -> dict[str, object]:
    """The row as the environment gave it. Raises EpisodeFailed for a prompt from elsewhere."""
    found = task.prompt.columns.get(COLUMN, "")
    try:
        row = json.loads(found)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise EpisodeFailed(
            f"the prompt has no column {COLUMN!r} with a row of the environment: set format = 'verifiers' in the "
            "stream and name the description as its dataset"
        )
    return row
