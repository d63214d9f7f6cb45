"""The contract of a workflow: a task in, a trajectory out, sampling and scoring through what it is given.

A workflow is a coroutine in the worker's one thread: it awaits generations and scores and blocks on nothing else, so
that the episodes of a worker overlap. It never sees weights, versions or leases; the sessions it samples through are
bound to the task's versions and end with its deadline.
"""

import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.connectors.engines.engine import Generation, neutral
from headrace.connectors.plugins import load
from headrace.pipeline.rewards.reward import Completion
from headrace.schemas import parts
from headrace.schemas.errors import ConfigurationError, HeadraceError
from headrace.schemas.parts import Reward, RolePart, Sampling
from headrace.schemas.records import Prompt, Task, Trajectory

__all__ = (
    "EXCLUDING",
    "EpisodeFailed",
    "PolicySession",
    "Scoring",
    "Workflow",
    "WorkflowOptions",
    "check_generation",
    "make_workflow",
    "sequence_of",
    "trajectory_of",
    "with_seed",
)

EXCLUDING = ("abort", "env_timeout", "env_error", "tool_error")
"""End reasons of what counts nowhere."""


class EpisodeFailed(HeadraceError):
    """An episode that gives no usable trajectory; its trajectory is excluded with this message."""

    def __init__(self, message: str, end_reason: str = "env_error") -> None:
        super().__init__(message)
        self.end_reason = end_reason


class WorkflowOptions(BaseModel):
    """``streams.S.workflow_options``; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PolicySession(Protocol):
    """One policy as a task may use it."""

    @property
    def policy(self) -> int:
        """Index of the policy."""
        ...

    def encode(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """Token ids of a prompt; remembered by its prompt id, unless that is empty."""
        ...

    def decode(self, tokens: npt.NDArray[np.int32]) -> str:
        """Text of token ids without special tokens."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of messages, up to where the answer begins. Raises ValueError."""
        ...

    def tokenize(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of text as it is."""
        ...

    def detokenize(self, tokens: npt.NDArray[np.int32]) -> str:
        """Text of token ids, special tokens written out."""
        ...

    async def generate(self, prompt: npt.NDArray[np.int32], sampling: Sampling) -> Generation:
        """Sample a completion; no token is sampled below the task's min version. Raises PromptTooLong."""
        ...


class Scoring(Protocol):
    """The prompt's reward."""

    async def score(self, prompt: Prompt, completion: Completion, *, role: str = "") -> list[Reward]:
        """Reward parts. Raises RewardFailed."""
        ...


class Workflow(Protocol):
    """A workflow plug-in, made once for each stream.

    A class with an attribute ``Options`` (a model over WorkflowOptions) is made from an instance of it, any other
    without arguments; with ``team`` set it is also given the stream's policies (name to index), which it gives roles
    to, and which are evaluated together. ``close``, where there is one, is awaited when the worker leaves.
    """

    async def run(self, task: Task, engines: Mapping[int, PolicySession], rewards: Scoring) -> Trajectory:
        """Play the task's episode. ``engines``: the task's policies by index. ``task.sampling.seed`` is set: several
        generations of one episode take seeds of their own from it (``with_seed``).

        Any exception excludes the trajectory; EpisodeFailed says why in words of its own.
        """
        ...


def check_generation(generation: Generation) -> None:
    """Raise EpisodeFailed for a generation without tokens or with a log-prob that is not finite."""
    if generation.tokens.size == 0:
        raise EpisodeFailed(f"empty completion: no token was sampled (end reason {generation.end_reason})", "abort")
    if not np.isfinite(generation.logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(generation.logprobs))[0])
        raise EpisodeFailed(
            f"log-prob of sampled token {at} is {generation.logprobs[at]} at version {generation.versions[at]}: the "
            "weights or logits are not finite"
        )


def sequence_of(
    policy: int, role: str, prompt: npt.NDArray[np.int32], generation: Generation, sampling: Sampling
) -> parts.Sequence:
    """A Sequence of one prompt and one generation, with the masks that its end and its sampling ask for.

    Sampling that changes the distribution, and a full context, are not trained: mask 0 throughout. Raises
    EpisodeFailed for a generation without tokens or with a log-prob that is not finite.
    """
    check_generation(generation)
    made = generation.tokens.size
    trainable = neutral(sampling) and generation.known
    trained = trainable and generation.end_reason != "context_full"
    before = prompt.size
    logprobs, mask = np.zeros(before + made, np.float32), np.zeros(before + made, np.uint8)
    versions = np.full(before + made, -1, np.int32)
    versions[before:] = generation.versions
    if trained:
        logprobs[before:], mask[before:] = generation.logprobs, 1
    return parts.Sequence(
        policy=policy,
        role=role,
        prompt_length=before,
        end_reason=generation.end_reason,
        oldest_version=int(generation.versions.min()) if trained else -1,
        newest_version=int(generation.versions.max()) if trained else -1,
        trainable=trainable,
        sampling=sampling,
        tokens=np.concatenate([prompt, generation.tokens]),
        logprobs=logprobs,
        mask=mask,
        versions=versions,
    )


def trajectory_of(
    task: Task,
    sequences: Sequence[parts.Sequence],
    rewards: Sequence[Reward],
    *,
    started_ms: int,
    prompt_text: str = "",
    completion_text: str = "",
    error: str = "",
    end_reason: str = "",
    reward: float | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Trajectory:
    """The Trajectory of a task from what its episode made; with ``error``, an excluded one.

    The reward is the given one, else the sum of the parts without role and turn. End reason: the given one, else the
    last sequence's. ``metrics``: figures for people.
    """
    end = end_reason or (sequences[-1].end_reason if sequences else "abort")
    oldest: dict[str, int] = {}
    for sequence in sequences:
        if sequence.oldest_version >= 0:
            key = str(sequence.policy)
            oldest[key] = min(oldest.get(key, sequence.oldest_version), sequence.oldest_version)
    excluded = bool(error) or end in EXCLUDING
    return Trajectory(
        group=task.group,
        replica=task.replica,
        attempt=task.attempt,
        worker=task.worker,
        incarnation=task.incarnation,
        stream=task.stream,
        prompt_id=task.prompt.prompt_id,
        status="excluded" if excluded else "train",
        end_reason=end,
        reward=sum(p.value for p in rewards if not p.role and p.turn < 0) if reward is None else reward,
        tokens=sum(int(sequence.mask.sum()) for sequence in sequences),
        started_ms=started_ms,
        finished_ms=time.time_ns() // 1_000_000,
        task_type=task.prompt.task_type,
        error=error,
        prompt_text=prompt_text,
        completion_text=completion_text,
        metrics=dict(metrics or {}),
        rewards=list(rewards),
        oldest_versions=oldest,
        roles=_roles(sequences),
        sources=list(task.sources),
        sequences=list(sequences),
    )


def make_workflow(name: str, options: Mapping[str, Any], policies: Mapping[str, int] | None = None) -> Workflow:
    """The workflow behind a name with its options. Raises ConfigurationError for unknown names and options.

    ``policies``: those of the stream, name to index, for a workflow that gives roles to them (``team``).
    """
    found = load("headrace.workflows", name)
    model = getattr(found, "Options", None)
    if model is None and options:
        raise ConfigurationError(f"streams.S.workflow_options: workflow {name!r} has none, {', '.join(options)} given")
    try:
        given = [model.model_validate(dict(options))] if model is not None else []
        made: Workflow = found(*given, policies or {}) if getattr(found, "team", False) else found(*given)
    except ValidationError as error:
        raise ConfigurationError(f"streams.S.workflow_options for workflow {name!r}: {error}") from error
    return made


def _roles(sequences: Sequence[parts.Sequence]) -> list[RolePart]:
    """Who played what, where that is more than one role."""
    trained: Counter[tuple[str, int]] = Counter()
    for sequence in sequences:
        trained[sequence.role, sequence.policy] += int(sequence.mask.sum())
    if len(trained) < 2:
        return []
    return [RolePart(role=role, policy=policy, tokens=tokens) for (role, policy), tokens in trained.items()]


def with_seed(sampling: Sampling, name: str) -> Sampling:
    """The same parameters with a seed that follows from ``name``: equal names sample equal tokens."""
    return replace(sampling, seed=zlib.crc32(name.encode()))
