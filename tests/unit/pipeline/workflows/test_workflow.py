"""Sequences and trajectories follow from generations by rules that hold for every length, end and sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.connectors.engines.engine import Generation
from headrace.pipeline.workflows.workflow import EpisodeFailed, sequence_of, trajectory_of, with_seed
from headrace.schemas.checks import check_record
from headrace.schemas.parts import Reward, Sampling
from headrace.schemas.parts import Sequence as TokenSequence
from headrace.schemas.records import Record, Task

ENDS = ("stop", "length", "context_full", "abort", "env_timeout", "env_error", "tool_error")
SAMPLINGS = (
    Sampling(), Sampling(temperature=0.5), Sampling(temperature=0.0), Sampling(top_p=0.9), Sampling(top_k=3)
)  # fmt: skip


def generation(count: int, end: str, versions: list[int] | None = None) -> Generation:
    return Generation(
        key=1,
        end_reason=end,
        tokens=np.arange(10, 10 + count, dtype=np.int32),
        logprobs=np.linspace(-2, -0.1, count, dtype=np.float32),
        versions=np.array((versions or list(range(3, 3 + count)))[:count], np.int32),
    )


@pytest.fixture
def task(examples: dict[str, Record]) -> Task:
    found: Any = examples["Task"]
    return replace(found, sources=[])


@settings(max_examples=120, deadline=None)
@given(
    before=st.integers(0, 6),
    made=st.integers(1, 8),
    end=st.sampled_from(ENDS),
    sampling=st.sampled_from(SAMPLINGS),
    newest=st.integers(0, 4),
)
def test_arrays_are_of_one_length_and_only_sampled_tokens_are_trained(
    before: int, made: int, end: str, sampling: Sampling, newest: int
) -> None:
    prompt = np.arange(before, dtype=np.int32)
    versions = [5 + min(newest, at) for at in range(made)]
    done = generation(made, end, versions)
    sequence = sequence_of(2, "policy", prompt, done, sampling)
    assert {a.size for a in (sequence.tokens, sequence.logprobs, sequence.mask, sequence.versions)} == {before + made}
    assert sequence.tokens.tolist() == [*prompt.tolist(), *done.tokens.tolist()]
    assert not sequence.mask[:before].any() and (sequence.versions[:before] == -1).all()
    assert sequence.versions[before:].tolist() == versions
    trained = sampling.temperature > 0 and sampling.top_p == 1 and sampling.top_k <= 0 and end != "context_full"
    assert sequence.mask[before:].tolist() == [int(trained)] * made
    assert (sequence.oldest_version, sequence.newest_version) == ((5, max(versions)) if trained else (-1, -1))
    assert np.array_equal(sequence.logprobs[before:], done.logprobs if trained else np.zeros(made, np.float32))


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_log_prob_that_is_not_finite_is_named_by_place_and_version(at: int, value: float) -> None:
    done = generation(3, "stop")
    done.logprobs[at] = value
    with pytest.raises(EpisodeFailed, match=f"sampled token {at} is {value} at version {3 + at}"):
        sequence_of(0, "policy", np.array([1], np.int32), done, Sampling())


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("error", ["", "it broke"])
def test_status_follows_from_end_and_error_alone(task: Task, end: str, error: str) -> None:
    sequence = sequence_of(0, "policy", np.array([1], np.int32), generation(2, end), Sampling())
    made = trajectory_of(task, [sequence], [], started_ms=1, error=error)
    counts = end in ("stop", "length", "context_full") and not error
    assert made.status == ("train" if counts else "excluded") and made.end_reason == end
    if counts or error:
        check_record(made)


def test_the_given_end_reason_wins_over_the_last_sequences(task: Task) -> None:
    two = [sequence_of(0, "policy", np.array([1], np.int32), generation(2, e), Sampling()) for e in ("length", "stop")]
    assert trajectory_of(task, two, [], started_ms=1).end_reason == "stop"
    assert trajectory_of(task, two, [], started_ms=1, end_reason="env_error").status == "excluded"
    assert trajectory_of(task, [], [], started_ms=1).end_reason == "abort"


@pytest.mark.parametrize(
    ("rewards", "total"),
    [
        ([], 0.0),
        ([Reward(name="a", value=0.5), Reward(name="b", value=-2.0)], -1.5),
        ([Reward(name="a", value=0.5), Reward(name="a", value=1.0, role="judge")], 0.5),
        ([Reward(name="a", value=0.5), Reward(name="a", value=1.0, turn=0)], 0.5),
        ([Reward(name="a", value=0.5, turn=2, role="x")], 0.0),
    ],
)
def test_the_reward_sums_the_parts_of_the_whole_trajectory(task: Task, rewards: list[Reward], total: float) -> None:
    made = trajectory_of(task, [], rewards, started_ms=1)
    assert made.reward == total and made.rewards == rewards


def test_oldest_versions_are_those_of_trained_tokens_by_policy(
    task: Task, make_sequence: Callable[..., TokenSequence]
) -> None:
    sequences = [
        make_sequence(policy=0, oldest_version=7),
        make_sequence(policy=0, oldest_version=5),
        make_sequence(policy=1, oldest_version=-1),
        make_sequence(policy=2, oldest_version=9),
    ]
    made = trajectory_of(task, sequences, [], started_ms=1)
    assert made.oldest_versions == {"0": 5, "2": 9}
    assert made.tokens == sum(int(s.mask.sum()) for s in sequences)


def test_seeds_follow_from_names_and_change_nothing_else() -> None:
    base = Sampling(temperature=0.5, top_p=0.9, top_k=4, max_new_tokens=9)
    one, again, other = (with_seed(base, name) for name in ("a", "a", "b"))
    assert one == again and one.seed != other.seed
    assert replace(one, seed=base.seed) == base
    assert len({with_seed(base, f"0 train {g} {r} 0").seed for g in range(40) for r in range(8)}) == 320
    assert all(with_seed(base, str(n)).seed >= 0 for n in range(200))
