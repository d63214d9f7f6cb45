"""The scorer of a run: rewards are loaded or refused at once, and each prompt gets the one that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.pipeline.evaluation import EVALUATION_STREAM
from headrace.pipeline.rewards.reward import Completion, RewardFailed
from headrace.pipeline.rewards.scorer import Scorer
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Reward
from headrace.schemas.records import Prompt

SOURCE = """
import os
import time

class Inline:
    isolation = "inline"
    def __init__(self, options):
        self.options = options
    def __call__(self, prompt, completion):
        return {"process": os.getpid(), "timeout": self.options.timeout_seconds}

def process(prompt, completion):
    return os.getpid()

def hangs(prompt, completion):
    time.sleep(3600)
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "scorer_rewards.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    yield


def config(evaluation: dict[str, Any] | None = None, **streams: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "policies": {"main": {"model": "none"}},
            "streams": {name: {"dataset": "none", **section} for name, section in streams.items()},
            "eval": evaluation or {},
        }
    )


def prompt(reward: str, stream: str = "main") -> Prompt:
    return Prompt(
        prompt_id="1", stream=stream, dataset="d", row=0, epoch=0, position=0, prompt="21=", answer="12", reward=reward
    )


def scored(scorer: Scorer, asked: Prompt, text: str = "12", role: str = "") -> list[Reward]:
    try:
        return asyncio.run(scorer.score(asked, Completion(text, "stop", np.array([2], np.int32)), role=role))
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"main": {"reward": "exact_mach"}}, "did you mean 'exact_match'"),
        ({"main": {"reward": "no_such_module:f"}}, "no_such_module"),
        ({"main": {"reward_options": {"stripp": True}}}, "stripp"),
        ({"main": {}, "other": {"reward": "nothing_like_it"}}, "nothing_like_it"),
        ({"main": {}, "evaluation": {"reward": "nothing_like_it"}}, "nothing_like_it"),
    ],
)
def test_a_wrong_reward_or_option_is_refused_before_anything_is_sampled(made: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Scorer(config(**made))


def test_rewards_of_a_column_are_loaded_when_a_prompt_names_them() -> None:
    scorer = Scorer(config(main={"reward": "unknown", "reward_column": "kind"}))
    assert [(r.name, r.value) for r in scored(scorer, prompt("exact_match"))] == [("exact_match", 1.0)]
    with pytest.raises(ConfigurationError, match="unknown"):
        scored(scorer, prompt("unknown"))


def test_options_are_those_of_the_prompts_stream_and_of_the_first_for_evaluation() -> None:
    scorer = Scorer(config(main={"reward_options": {"strip": True}}, other={}))
    asked = {stream: scored(scorer, prompt("exact_match", stream), " 12 ")[0].value
             for stream in ("main", "other", EVALUATION_STREAM)}  # fmt: skip
    assert asked == {"main": 1.0, "other": 0.0, EVALUATION_STREAM: 1.0}


def test_a_role_marks_every_part(rewards: None) -> None:
    scorer = Scorer(config(main={"reward": "scorer_rewards:Inline", "reward_options": {"timeout_seconds": 2.5}}))
    found = scored(scorer, prompt("scorer_rewards:Inline"), role="judge")
    assert {(r.name, r.role) for r in found} == {("process", "judge"), ("timeout", "judge")}
    assert next(r.value for r in found if r.name == "timeout") == 2.5


def test_inline_rewards_run_here_and_all_others_elsewhere(rewards: None) -> None:
    import os

    scorer = Scorer(config(main={"reward": "scorer_rewards:Inline"}, other={"reward": "scorer_rewards:process"}))
    here = next(r.value for r in scored(scorer, prompt("scorer_rewards:Inline")) if r.name == "process")
    (there,) = scored(scorer, prompt("scorer_rewards:process", "other"))
    assert here == os.getpid() != there.value


def test_the_streams_timeout_ends_a_reward_that_hangs(rewards: None) -> None:
    made = config(main={"reward": "scorer_rewards:hangs", "reward_options": {"timeout_seconds": 0.2}})
    with pytest.raises(RewardFailed, match=r"scorer_rewards:hangs did not return within 0\.2 s"):
        scored(Scorer(made), prompt("scorer_rewards:hangs"))
