"""The workflow ``multi_turn``: a policy acts in an environment until the episode, its turns or its context end.

Goes in: a task; comes out: a trajectory with one sequence for each context that was sampled in. While the chat template
only adds to what was there, all turns are one sequence; where it takes something away (the thinking of earlier turns),
or a sub-agent begins, another starts. Tokens of template, tools and observations have mask 0.
"""

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from headrace.connectors.engines.engine import PromptTooLong
from headrace.pipeline.capture.transcript import Reply, Transcript
from headrace.pipeline.environments.environment import EnvironmentFailed, Observation
from headrace.pipeline.environments.host import EnvironmentHost, Episode
from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.workflow import (
    EpisodeFailed,
    PolicySession,
    Scoring,
    WorkflowOptions,
    trajectory_of,
)
from headrace.schemas.parts import Reward
from headrace.schemas.records import Prompt, Task, Trajectory

__all__ = ("MultiTurn", "MultiTurnOptions", "episode_seed")


class MultiTurnOptions(WorkflowOptions):
    """Options of ``multi_turn``."""

    environment: str
    """Name of the environment plug-in, or ``module:Class``."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment's own."""
    turns: int = Field(16, ge=1)
    """Actions of an episode, those of sub-agents included; then it ends as it stands."""
    form: Literal["chat", "text"] = "chat"
    """``chat``: observations are messages of the model's chat template; ``text``: they follow as they are."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end an action, such as ``</search>``; they are kept and trained."""
    observation_role: str = "user"
    """Role of the messages that observations become, the first one excepted; ``tool`` for templates that know it."""
    system: str = ""
    """A system message in front of every context."""
    depth: int = Field(4, ge=0)
    """Sub-agents below each other at most; the environment is told when one more is refused."""
    reward: Literal["environment", "stream", "both"] = "environment"
    """Whose rewards count: those of the environment's steps, or the stream's reward of the last action."""
    step_seconds: float = Field(30.0, gt=0)
    """Time for one call of the environment; then its process is killed."""
    processes: int = Field(32, ge=1)
    """Processes of environments; an episode beyond waits for one."""


@dataclass(slots=True)
class _Played:
    """An episode so far: the open contexts, the innermost last, and what the environment gave."""

    contexts: list[list[dict[str, Any]]]
    tools: Sequence[Mapping[str, Any]] = ()
    text: list[str] = field(default_factory=list)
    """Of each context, in the form ``text``, all that it holds."""
    shown: list[str] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    total: float = 0.0
    end_reason: str = ""
    last: Reply | None = None


class MultiTurn:
    """See the module."""

    Options = MultiTurnOptions

    def __init__(self, options: MultiTurnOptions) -> None:
        self._options = options
        self._host = EnvironmentHost(
            options.environment,
            options.environment_options,
            processes=options.processes,
            step_seconds=options.step_seconds,
        )

    async def run(self, task: Task, engines: Mapping[int, PolicySession], rewards: Scoring) -> Trajectory:
        """Play one episode with the task's first policy. Raises EpisodeFailed for what the environment did."""
        started = time.time_ns() // 1_000_000
        session = next(iter(engines.values()))
        transcript = Transcript(session, task.sampling)
        try:
            async with self._host.episode() as episode:
                played = await self._play(task, episode, session, transcript)
        except EnvironmentFailed as error:
            raise EpisodeFailed(str(error), error.end_reason) from error
        scores = await self._scores(task.prompt, played, rewards)
        sequences = transcript.sequences()
        return trajectory_of(
            task,
            sequences,
            scores,
            started_ms=started,
            end_reason=played.end_reason,
            prompt_text=played.shown[0] if played.shown else "",
            completion_text="\n".join(played.shown[1:]),
            metrics={"turns": float(transcript.calls), "sequences_per_trajectory": float(len(sequences))},
        )

    async def close(self) -> None:
        """End the environments' processes."""
        await self._host.close()

    async def _play(self, task: Task, episode: Episode, session: PolicySession, transcript: Transcript) -> _Played:
        seen, tools = await episode.reset(episode_seed(task), task.prompt)
        played = _Played([self._opening(task.prompt, seen)], tools, [seen.text], [seen.text])
        for turn in range(self._options.turns):
            text = played.text[-1] if self._options.form == "text" else session.render(played.contexts[-1], tools)
            try:
                reply = await transcript.sample(transcript.context(text), stop=self._options.stop)
            except PromptTooLong:
                if turn == 0:
                    raise
                played.end_reason = "context_full"
                return played
            played.last = reply
            played.shown.append(reply.text)
            played.contexts[-1].append({"role": "assistant", "content": reply.content})
            played.text[-1] = text + reply.raw
            seen = await episode.step(reply.text)
            played.total += seen.reward
            detail = json.dumps(dict(seen.details), ensure_ascii=False) if seen.details else ""
            played.rewards.append(Reward(name="environment", value=seen.reward, turn=turn, detail=detail))
            if seen.done:
                return played
            if reply.end_reason == "context_full":
                played.end_reason = "context_full"
                return played
            self._observe(task.prompt, played, seen)
        return played

    def _opening(self, prompt: Prompt, seen: Observation) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self._options.system}] if self._options.system else []
        before = [{"role": m.role, "content": m.content} for m in prompt.messages]
        return [*system, *before, *([{"role": "user", "content": seen.text}] if seen.text or not before else [])]

    def _observe(self, prompt: Prompt, played: _Played, seen: Observation) -> None:
        """Put an observation where it belongs: the present context, a new one, or the one that this was begun from."""
        played.shown.append(seen.text)
        if seen.agent == "begin":
            if len(played.contexts) > self._options.depth:
                raise EpisodeFailed(
                    f"environment {self._options.environment} began sub-agent {len(played.contexts)} of one another; "
                    f"workflow_options.depth is {self._options.depth}"
                )
            system = [{"role": "system", "content": self._options.system}] if self._options.system else []
            played.contexts.append([*system, {"role": "user", "content": seen.text}])
            played.text.append(seen.text)
            return
        if seen.agent == "end" and len(played.contexts) > 1:
            played.contexts.pop()
            played.text.pop()
        played.contexts[-1].append({"role": self._options.observation_role, "content": seen.text})
        played.text[-1] += seen.text

    async def _scores(self, prompt: Prompt, played: _Played, rewards: Scoring) -> list[Reward]:
        scores = list(played.rewards)
        if self._options.reward != "stream":
            scores.append(Reward(name="environment", value=played.total))
        if self._options.reward != "environment":
            assert played.last is not None
            last = Completion(played.last.text, played.last.end_reason, played.last.ids)
            scores += await rewards.score(prompt, last)
        return scores


def episode_seed(task: Task) -> int:
    """The seed of a task's episode: one for all replicas of a group, and for every evaluation of a prompt the same.

    A column ``seed`` of the prompt that holds a number is taken as it is.
    """
    given = task.prompt.columns.get("seed", "")
    if given.strip().lstrip("-").isdecimal():
        return int(given)
    epoch = -1 if task.kind == "eval" else task.prompt.epoch
    return zlib.crc32(f"{task.prompt.prompt_id} {epoch}".encode())
