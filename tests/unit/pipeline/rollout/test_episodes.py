"""Every task ends in exactly one result, whatever its workflow, reward, engine or deadline does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.connectors.engines.scripted import ScriptedEngine
from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.rewards.scorer import Scorer
from headrace.pipeline.rollout.episodes import Episodes
from headrace.pipeline.rollout.sampler import Sampler
from headrace.pipeline.workflows.workflow import EpisodeFailed, PolicySession, Scoring, trajectory_of
from headrace.schemas.checks import check_record
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import PolicyBound, Sampling, Source
from headrace.schemas.records import EvalResult, Prompt, Record, Score, Task, Trajectory

PLACE = Source(topic="tasks", partition=3, offset=17)
REWARDS = """
class Fails:
    isolation = "inline"
    def __init__(self, options): pass
    def __call__(self, prompt, completion): raise RuntimeError("no judge today")
"""


class Plays:
    """A workflow of a test: what it does is set before its run."""

    how: Any = None

    async def run(self, task: Task, engines: Mapping[int, PolicySession], rewards: Scoring) -> Trajectory:
        made: Trajectory = await Plays.how(task, engines, rewards)
        return made


@dataclass
class Kept:
    """Where results go instead of into topics; every record is checked as the codec would."""

    trajectories: list[Trajectory] = field(default_factory=list)
    evaluations: list[EvalResult] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    def _take(self, where: list[Any], record: Record) -> None:
        check_record(record)
        where.append(record)

    async def trajectory(self, record: Trajectory) -> None:
        self._take(self.trajectories, record)

    async def evaluation(self, record: EvalResult) -> None:
        self._take(self.evaluations, record)

    async def score(self, record: Score) -> None:
        self._take(self.scores, record)


class Stage:
    """Episodes over a scripted engine at version 3."""

    def __init__(self, model: Path, seed: int = 0, workflow: str = "single_turn", reward: str = "exact_match") -> None:
        self.config = RunConfig.model_validate(
            {
                "run": {"seed": seed},
                "policies": {"main": {"model": "none"}},
                "streams": {"main": {"dataset": "none", "workflow": workflow, "reward": reward}},
            }
        )
        self.sampler = Sampler(0, ScriptedEngine(slots=4, max_prompt_tokens=16), ModelFolder(model))
        self.sampler.load({}, 3)
        self.kept = Kept()
        self.scorer = Scorer(self.config)
        self.episodes = Episodes(self.config, {0: self.sampler}, self.scorer, self.kept)  # type: ignore[arg-type]

    def task(self, **over: Any) -> Task:
        stream = self.config.streams["main"]
        prompt = Prompt(
            prompt_id="abc", stream="main", dataset="d", row=0, epoch=0, position=0, prompt="21=", answer="12",
            reward=stream.reward,
        )  # fmt: skip
        fields: dict[str, Any] = {
            "kind": "train", "group": 5, "replica": 1, "attempt": 0, "stream": "main", "worker": "w", "incarnation": 9,
            "sequence": 0, "issued_ms": 0, "deadline_ms": 1 << 45, "prompt": prompt, "workflow": stream.workflow,
            "policies": [PolicyBound(policy=0, min_version=0)], "sampling": Sampling(max_new_tokens=6), "sources": [],
        }  # fmt: skip
        return Task(**{**fields, **over})

    def play(self, *tasks: Task) -> None:
        """Play tasks together, decoding whenever something is active."""

        async def all_of_them() -> None:
            playing = [asyncio.create_task(self.episodes.play(task, PLACE)) for task in tasks]
            while not all(one.done() for one in playing):
                if self.sampler.busy:
                    self.sampler.step()
                await asyncio.sleep(0)
            for one in playing:
                one.result()

        asyncio.run(all_of_them())


@pytest.fixture
def stage(tiny_model: Path) -> Iterator[Stage]:
    made = Stage(tiny_model)
    yield made
    made.scorer.close()


@pytest.fixture
def scripted(tiny_model: Path) -> Stage:
    """A stage whose workflow is ``Plays``."""
    made = Stage(tiny_model)
    made.episodes._workflows["main plays"] = Plays()
    return made


def test_a_task_becomes_one_trajectory_that_names_it(stage: Stage) -> None:
    stage.play(stage.task())
    (made,) = stage.kept.trajectories
    assert (made.group, made.replica, made.attempt, made.worker, made.incarnation) == (5, 1, 0, "w", 9)
    assert (made.status, made.prompt_text, made.error) == ("train", "21=", "")
    assert made.sources == [PLACE]
    assert stage.episodes.counts == {"train train": 1}


def test_replicas_of_a_group_differ_and_a_repeat_of_an_attempt_samples_the_same(tiny_model: Path) -> None:
    def tokens(seed: int, **over: Any) -> tuple[int, ...]:
        stage = Stage(tiny_model, seed=seed)
        stage.play(stage.task(**over))
        return tuple(stage.kept.trajectories[0].sequences[0].tokens.tolist())

    assert tokens(0) == tokens(0)
    others = [tokens(1), tokens(0, replica=2), tokens(0, attempt=1), tokens(0, group=6)]
    assert len({tokens(0), *others}) > 3, "run seed, group, replica and attempt each change what is sampled"
    assert tokens(0, sampling=Sampling(max_new_tokens=6, seed=4)) == tokens(
        7, sampling=Sampling(max_new_tokens=6, seed=4)
    ), "a seed that is given stands"


async def _raises_episode(task: Task, *_: Any) -> Trajectory:
    raise EpisodeFailed("the tool is gone", "tool_error")


async def _raises(task: Task, *_: Any) -> Trajectory:
    raise ZeroDivisionError("by zero")


async def _own_timeout(task: Task, *_: Any) -> Trajectory:
    raise TimeoutError("the search engine took too long")


async def _hangs(task: Task, *_: Any) -> Trajectory:
    await asyncio.Event().wait()
    raise AssertionError


async def _odd_text(task: Task, *_: Any) -> Trajectory:
    raise ValueError("bytes \ud800 here")


@pytest.mark.parametrize(
    ("how", "over", "reason", "says", "counted"),
    [
        (_raises_episode, {}, "tool_error", "the tool is gone", "failed: episode"),
        (_raises, {}, "env_error", "workflow plays raised ZeroDivisionError: by zero", "failed: workflow"),
        (_own_timeout, {}, "env_timeout", "plays raised TimeoutError: the search engine", "failed: workflow"),
        (_hangs, {"deadline_ms": 1}, "env_timeout", "the task's deadline passed after", "failed: deadline"),
        (_odd_text, {}, "env_error", "bytes \\ud800 here", "failed: workflow"),
        (_hangs, {"workflow": "no_such"}, "env_error", "ConfigurationError", "failed: workflow"),
        (_hangs, {"policies": [PolicyBound(policy=4, min_version=0)]}, "env_error", "KeyError", "failed: workflow"),
    ],
)
def test_a_failed_episode_is_an_excluded_trajectory_with_its_reason(
    scripted: Stage, how: Any, over: dict[str, Any], reason: str, says: str, counted: str
) -> None:
    Plays.how = how
    scripted.play(scripted.task(**{"workflow": "plays", **over}))
    (made,) = scripted.kept.trajectories
    assert (made.status, made.end_reason, made.reward, made.tokens) == ("excluded", reason, 0.0, 0)
    assert says in made.error and made.sequences == [] and made.oldest_versions == {}
    assert scripted.episodes.counts == {counted: 1, "train excluded": 1}


def test_a_prompt_over_the_limit_is_named(stage: Stage) -> None:
    task = stage.task()
    stage.play(replace(task, prompt=replace(task.prompt, prompt="1" * 17)))
    (made,) = stage.kept.trajectories
    assert made.end_reason == "abort" and made.error.startswith("prompt_too_long: ") and "at most 16" in made.error
    assert stage.episodes.counts["failed: prompt_too_long"] == 1


def test_a_reward_that_raises_excludes_its_trajectory(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "episode_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    stage = Stage(tiny_model, reward="episode_rewards:Fails")
    stage.play(stage.task(), stage.task(replica=2))
    assert {(t.replica, t.status) for t in stage.kept.trajectories} == {(1, "excluded"), (2, "excluded")}
    assert all("raised RuntimeError: no judge today" in t.error for t in stage.kept.trajectories)


def test_one_failure_leaves_the_others_alone(scripted: Stage) -> None:
    Plays.how = _raises
    scripted.play(scripted.task(), scripted.task(replica=2, workflow="plays"), scripted.task(replica=3))
    assert {t.replica: t.status for t in scripted.kept.trajectories} == {1: "train", 2: "excluded", 3: "train"}
    assert not scripted.sampler.busy


def test_a_deadline_frees_the_row_of_its_episode(scripted: Stage) -> None:
    async def generates(task: Task, engines: Mapping[int, PolicySession], rewards: Scoring) -> Trajectory:
        engine = engines[0]
        await engine.generate(np.array([5, 6], np.int32), Sampling(max_new_tokens=1 << 20, seed=1))
        await asyncio.Event().wait()
        return trajectory_of(task, [], [], started_ms=0)

    Plays.how = generates
    scripted.play(scripted.task(workflow="plays", deadline_ms=1))
    assert scripted.kept.trajectories[0].end_reason == "env_timeout"
    assert scripted.sampler.engine.active == 0


def test_a_score_task_without_a_group_reward_says_so(stage: Stage) -> None:
    stage.play(stage.task(kind="score"))
    (made,) = stage.kept.scores
    assert made.group == 5 and "no group-scope reward: 'exact_match'" in made.error
    assert stage.kept.trajectories == []


def test_an_evaluation_says_the_version_asked_for_and_those_that_sampled(stage: Stage) -> None:
    stage.play(stage.task(kind="eval", policies=[PolicyBound(policy=0, min_version=2)]))
    (made,) = stage.kept.evaluations
    assert (made.version, made.oldest_version, made.newest_version) == (2, 3, 3)
    assert (made.prompt_id, made.replica, made.policy, made.suite) == ("abc", 1, 0, stage.config.eval.suite)
    assert made.tokens > 0 and made.error == "" and made.sources == [PLACE]


def test_greedy_evaluation_counts_its_tokens_though_none_is_trained(stage: Stage) -> None:
    greedy = Sampling(temperature=0.0, max_new_tokens=6, seed=1)
    stage.play(stage.task(kind="eval", sampling=greedy))
    (made,) = stage.kept.evaluations
    assert made.tokens > 0 and (made.oldest_version, made.newest_version) == (3, 3)


def test_a_failed_evaluation_is_a_result_with_an_error(scripted: Stage) -> None:
    Plays.how = _raises
    scripted.play(scripted.task(kind="eval", workflow="plays"))
    (made,) = scripted.kept.evaluations
    assert "ZeroDivisionError" in made.error and (made.reward, made.tokens, made.oldest_version) == (0.0, 0, 3)


def test_a_workflow_that_is_not_installed_is_refused_at_the_start(tiny_model: Path) -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'single_turn'"):
        Stage(tiny_model, workflow="single_tun")
