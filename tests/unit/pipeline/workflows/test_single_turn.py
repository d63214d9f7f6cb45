"""The single-turn workflow, and how sequences and trajectories follow from what was sampled."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace.connectors.engines.engine import Generation
from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.single_turn import SingleTurn
from headrace.pipeline.workflows.workflow import EpisodeFailed, sequence_of, trajectory_of
from headrace.schemas.checks import check_record
from headrace.schemas.parts import PolicyBound, Reward, Sampling
from headrace.schemas.records import Prompt, Record, Task

PROMPT = np.array([5, 6, 7], np.int32)


def _generation(end: str = "stop", **over: Any) -> Generation:
    fields: dict[str, Any] = {
        "tokens": np.array([8, 9, 2], np.int32),
        "logprobs": np.array([-0.1, -0.2, -0.3], np.float32),
        "versions": np.array([4, 4, 5], np.int32),
    }
    return Generation(1, end, **{**fields, **over})


class Session:
    """A policy that always says the same."""

    def __init__(self, policy: int) -> None:
        self.policy = policy
        self.seeds: list[int] = []

    def encode(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        return PROMPT

    def decode(self, tokens: npt.NDArray[np.int32]) -> str:
        return f"answer {self.policy}"

    async def generate(self, prompt: npt.NDArray[np.int32], sampling: Sampling) -> Generation:
        self.seeds.append(sampling.seed)
        return _generation()


class Judge:
    """Scores by the policy's number."""

    async def score(self, prompt: Prompt, completion: Completion, *, role: str = "") -> list[Reward]:
        return [Reward(name="judge", value=float(completion.text[-1]) + 1, role=role)]


@pytest.fixture
def task(examples: dict[str, Record]) -> Task:
    found: Any = examples["Task"]
    return replace(found, sources=[])


def test_one_policy_gives_one_sequence_and_the_trajectorys_reward(task: Task) -> None:
    session = Session(0)
    made = asyncio.run(SingleTurn().run(task, {0: session}, Judge()))
    check_record(made)
    (sequence,) = made.sequences
    assert sequence.tokens.tolist() == [5, 6, 7, 8, 9, 2]
    assert sequence.mask.tolist() == [0, 0, 0, 1, 1, 1]
    assert sequence.versions.tolist() == [-1, -1, -1, 4, 4, 5]
    assert (sequence.oldest_version, sequence.newest_version, sequence.prompt_length) == (4, 5, 3)
    assert (made.status, made.end_reason, made.reward, made.tokens) == ("train", "stop", 1.0, 3)
    assert (made.group, made.replica, made.worker) == (task.group, task.replica, task.worker)
    assert made.oldest_versions == {"0": 4}
    assert session.seeds == [task.sampling.seed]


def test_two_policies_answer_each_in_its_role(task: Task) -> None:
    both = replace(task, policies=[PolicyBound(policy=p, min_version=0) for p in (0, 1)])
    sessions = {p: Session(p) for p in (0, 1)}
    made = asyncio.run(SingleTurn().run(both, {**sessions}, Judge()))
    assert sessions[0].seeds != sessions[1].seeds, "each samples with a seed of its own"
    assert [(s.policy, s.role) for s in made.sequences] == [(0, "policy0"), (1, "policy1")]
    assert [(r.role, r.value) for r in made.rewards] == [("policy0", 1.0), ("policy1", 2.0)]
    assert made.reward == 0


def test_what_changes_the_distribution_or_fills_the_context_is_not_trained() -> None:
    for sampling in (Sampling(top_p=0.9), Sampling(top_k=5), Sampling(temperature=0)):
        sequence = sequence_of(0, "policy", PROMPT, _generation(), sampling)
        assert not sequence.trainable
        assert sequence.mask.sum() == 0
        assert sequence.oldest_version == -1
        assert sequence.versions[3:].tolist() == [4, 4, 5], "who sampled a token is said, trained or not"
    full = sequence_of(0, "policy", PROMPT, _generation("context_full"), Sampling())
    assert full.trainable
    assert full.mask.sum() == 0
    assert sequence_of(0, "policy", PROMPT, _generation("length"), Sampling(temperature=0.7)).mask.sum() == 3


def test_an_empty_completion_and_a_broken_log_prob_fail_by_name() -> None:
    empty = {name: np.empty(0, kind) for name, kind in (("tokens", "i4"), ("logprobs", "f4"), ("versions", "i4"))}
    with pytest.raises(EpisodeFailed, match="empty completion: no token was sampled"):
        sequence_of(0, "policy", PROMPT, _generation("abort", **empty), Sampling())
    nan = np.array([-0.1, np.nan, -0.3], np.float32)
    with pytest.raises(EpisodeFailed, match="log-prob of sampled token 1 is nan at version 4"):
        sequence_of(0, "policy", PROMPT, _generation(logprobs=nan), Sampling())


@pytest.mark.parametrize(("end", "status"), [("stop", "train"), ("length", "train"), ("tool_error", "excluded")])
def test_the_end_reason_decides_whether_a_trajectory_counts(task: Task, end: str, status: str) -> None:
    sequence = sequence_of(0, "policy", PROMPT, _generation(end), Sampling())
    assert trajectory_of(task, [sequence], [], started_ms=1).status == status
    assert trajectory_of(task, [sequence], [], started_ms=1, error="why").status == "excluded"
