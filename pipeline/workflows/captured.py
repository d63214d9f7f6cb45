"""Episodes that somebody else plays, through the capture endpoint: what ``program`` and ``verifiers`` have in common.

Goes in: a task; comes out: a trajectory of all that was sampled through the base URL that was opened for its episode.
Who plays and what the reward is, is the workflow's.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field

from headrace.pipeline.capture.episode import CapturedEpisode, SamplingRule
from headrace.pipeline.capture.server import CaptureServer
from headrace.pipeline.workflows.workflow import (
    EpisodeFailed,
    PolicySession,
    Scoring,
    WorkflowOptions,
    trajectory_of,
)
from headrace.schemas.parts import Reward, Sequence
from headrace.schemas.records import Task, Trajectory

__all__ = ("Captured", "CapturedOptions", "Outcome")


class CapturedOptions(WorkflowOptions):
    """Options of every workflow whose episodes are captured."""

    sampling: SamplingRule = "task"
    """Whose temperature, top_p and top_k are in force: the run's, or what the client asks for."""
    parallel: int = Field(32, ge=1)
    """Episodes at a time; one beyond waits."""
    listen: str = "127.0.0.1"
    """Address of the endpoint, for programs that run elsewhere."""
    max_sequences: int = Field(256, ge=1)
    """An episode with more sequences fails: its contexts do not extend each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an episode was played: the text that counts as its completion, its rewards, figures for people."""

    completion: str
    rewards: list[Reward]
    metrics: Mapping[str, float] = field(default_factory=dict)


class Captured(ABC):
    """``who`` is what plays, for messages."""

    who = "the program"

    def __init__(self, options: CapturedOptions) -> None:
        self._captured = options
        self._server: CaptureServer | None = None
        self._starting = asyncio.Lock()
        self._room = asyncio.Semaphore(options.parallel)

    @abstractmethod
    async def play(self, task: Task, episode: CapturedEpisode, url: str, key: str, rewards: Scoring) -> Outcome:
        """Play the episode behind ``url``. Raises EpisodeFailed. It is called with the room for one episode held."""

    async def run(self, task: Task, engines: Mapping[int, PolicySession], rewards: Scoring) -> Trajectory:
        """Play once. Raises EpisodeFailed when that fails, samples nothing, or gives no reward."""
        started = time.time_ns() // 1_000_000
        server = await self._serving()
        episode = CapturedEpisode(engines, task.sampling, self._captured.sampling)
        url, key = server.open(episode)
        try:
            async with self._room:
                outcome = await self.play(task, episode, url, key, rewards)
        finally:
            server.close_episode(key)
        sequences = self.sampled(episode)
        counts = {"calls": float(episode.calls), "sequences_per_trajectory": float(len(sequences))}
        return trajectory_of(
            task,
            sequences,
            outcome.rewards,
            started_ms=started,
            prompt_text=task.prompt.prompt or "\n".join(m.content for m in task.prompt.messages),
            completion_text=outcome.completion,
            metrics={**outcome.metrics, **counts},
        )

    def sampled(self, episode: CapturedEpisode) -> list[Sequence]:
        """What was sampled. Raises EpisodeFailed for nothing, and for more sequences than there may be."""
        sequences = episode.sequences()
        if not sequences:
            raise EpisodeFailed(f"{self.who} ended without one call of OPENAI_BASE_URL", "tool_error")
        if len(sequences) > self._captured.max_sequences:
            raise EpisodeFailed(
                f"{episode.calls} calls made {len(sequences)} sequences, workflow_options.max_sequences is "
                f"{self._captured.max_sequences}: each changes the history of the one before"
            )
        return sequences

    async def close(self) -> None:
        """End the endpoint."""
        if self._server is not None:
            await self._server.close()

    async def _serving(self) -> CaptureServer:
        async with self._starting:
            if self._server is None:
                server = CaptureServer()
                await server.start(self._captured.listen)
                self._server = server
        return self._server
