"""Score tasks: members are judged together, and what fails is said of whom it concerns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.connectors.kafka_errors import KafkaFailure
from headrace.pipeline.judged import judged_members, scores_of
from headrace.pipeline.rewards.scorer import Scorer
from headrace.pipeline.rollout.group_scores import score_group
from headrace.schemas.checks import check_record
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import MemberScore, Source
from headrace.schemas.records import Record, Score, Task, Trajectory

SOURCE = """
from headrace.pipeline.rewards.reward import Graded, RewardFailed

class Lengths:
    scope = "group"
    isolation = "thread"
    spent = {"judge_tokens": 5}
    def __init__(self, options): pass
    def __call__(self, prompt, completions):
        return [
            Graded({"length": len(c.text)}, {"length": "said"}) if c.text else RewardFailed("empty")
            for c in completions
        ]

def breaks(prompt, completions):
    raise RuntimeError("no judge today")
breaks.scope = "group"
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "group_rewards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def scorer(**stream: Any) -> Scorer:
    return Scorer(RunConfig.model_validate({
        "policies": {"main": {"model": "none"}}, "streams": {"main": {"dataset": "none", **stream}},
    }))  # fmt: skip


def scored(examples: dict[str, Record], made: Scorer, texts: Sequence[str], error: Exception | None = None) -> Score:
    task: Any = examples["Task"]
    base: Any = examples["Trajectory"]
    members = [replace(base, replica=i, completion_text=t, blob=None) for i, t in enumerate(texts)]
    places = [Source(topic="trajectories", partition=1, offset=i) for i in range(len(texts))]

    def read(asked: Sequence[Source]) -> list[Trajectory]:
        assert list(asked) == places
        if error is not None:
            raise error
        return members

    reward = next(iter(made._loaded))[0]
    given: Task = replace(task, kind="score", members=places, prompt=replace(task.prompt, reward=reward))
    try:
        score = asyncio.run(score_group(given, made, read))
    finally:
        made.close()
    check_record(score)
    return score


def test_every_member_gets_its_parts_and_the_cost_is_told(examples: dict[str, Record]) -> None:
    made = scored(examples, scorer(reward="group_rewards:Lengths"), ["abc", "", "ü"])
    assert [(s.replica, s.name, s.value, s.error, s.detail) for s in made.scores] == [
        (0, "length", 3.0, "", "said"), (1, "", 0.0, "empty", ""), (2, "length", 1.0, "", "said"),
    ]  # fmt: skip
    assert made.error == "" and made.metrics == {"judge_tokens": 5.0}


def test_a_group_reward_beside_the_streams_own(examples: dict[str, Record]) -> None:
    made = scorer(reward="exact_match", group_reward="diversity")
    assert {s.name for s in scored(examples, made, ["a b", "c d"]).scores} == {"diversity"}


@pytest.mark.parametrize(
    ("reward", "texts", "error", "says"),
    [
        ("exact_match", ["a"], None, "no group-scope reward: 'exact_match'"),
        ("group_rewards:breaks", ["a"], None, "raised RuntimeError: no judge today"),
        ("group_rewards:Lengths", ["", ""], None, "no member could be judged: empty"),
        ("group_rewards:Lengths", [], None, "no member could be judged"),
        ("group_rewards:Lengths", ["a"], KafkaFailure("gone"), "gone"),
    ],
)
def test_what_fails_as_a_whole_is_an_error_of_the_score(
    examples: dict[str, Record], reward: str, texts: list[str], error: Exception | None, says: str
) -> None:
    made = scored(examples, scorer(reward=reward), texts, error)
    assert says in made.error and made.scores == []


def test_the_cost_is_told_once(examples: dict[str, Record]) -> None:
    made = scorer(reward="group_rewards:Lengths")
    assert scored(examples, made, ["a"]).metrics == {"judge_tokens": 5.0}
    assert scored(examples, made, ["a"]).metrics == {}


def test_a_row_that_names_a_reward_which_is_none_costs_its_group_alone(examples: dict[str, Record]) -> None:
    task: Any = examples["Task"]
    made = scorer(reward="group_rewards:Lengths", reward_column="judged_by")
    given: Task = replace(task, kind="score", members=[], prompt=replace(task.prompt, reward="nothing_like_it"))
    score = asyncio.run(score_group(given, made, lambda places: []))
    made.close()
    assert "nothing_like_it" in score.error and score.scores == []


def test_a_group_reward_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="did you mean"):
        scorer(group_reward="diversty")


def test_a_member_without_a_judgement_is_excluded_with_the_reason(examples: dict[str, Record]) -> None:
    base: Any = examples["Trajectory"]
    place = Source(topic="trajectories", partition=0, offset=1)
    reported = {r: (replace(base, replica=r), place) for r in range(3)}
    scores = [
        MemberScore(replica=0, name="judge", value=0.5, detail="fair"),
        MemberScore(replica=1, name="", value=0, error="no"),
    ]
    score = Score(group=5, worker="w", finished_ms=1, scores=scores)
    made = judged_members(reported, score)
    assert [(made[r][0].status, made[r][0].error) for r in range(3)] == [
        ("train", ""), ("excluded", "no"), ("excluded", "the group was judged without it"),
    ]  # fmt: skip
    assert [(r.name, r.value, r.detail) for r in scores_of(score)[0]] == [("judge", 0.5, "fair")]
    for without in (None, replace(score, error="all failed")):
        assert judged_members(reported, without) == reported
    assert scores_of(None) == {}
