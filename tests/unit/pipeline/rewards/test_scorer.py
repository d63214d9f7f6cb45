"""The scorer of a run: rewards are loaded or refused at once, and each prompt gets the one that it names."""

from __future__ import annotations

import asyncio
import time
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
import subprocess
import sys
import threading
import time
from pydantic import BaseModel
from headrace.pipeline.rewards.reward import Graded

GATE = threading.Event()

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

def exits(prompt, completion):
    raise SystemExit(3)

class ExitsInline:
    isolation = "inline"
    __init__ = lambda self, options: None
    __call__ = lambda self, prompt, completion: exits(prompt, completion)

class ExitsInThread(ExitsInline):
    isolation = "thread"

class NoTime(ExitsInline):
    class Options(BaseModel):
        pass
    __call__ = lambda self, prompt, completion: 1.0

class NoTimeInProcess(NoTime):
    isolation = "process"

class Says(ExitsInThread):
    isolation = "process"
    __call__ = lambda self, prompt, completion: Graded({"a": 1.0}, {"a": lambda: 1})

class Waits(ExitsInThread):
    __call__ = lambda self, prompt, completion: GATE.wait(60)

class NoLicence:
    def __init__(self, options):
        raise RuntimeError("no licence")

def dies(prompt, completion):
    os._exit(7)

def leaves(prompt, completion):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(os.environ["LEFT"], "w") as file: file.write(str(left.pid))
    time.sleep(3600)

def reads(prompt, completion):
    return float(len(sys.stdin.read()))
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
        ({"main": {"reward": "scorer_rewards:NoLicence"}}, "NoLicence' cannot be made: RuntimeError: no licence"),
        ({"main": {"reward_options": {"timeout_seconds": 0}}}, "timeout_seconds"),
        ({"main": {}, "evaluation": {"reward": "nothing_like_it"}}, "nothing_like_it"),
        ({"main": {}, "evaluation": {"reward": "exact_match", "reward_options": {"stripp": 1}}}, "eval.reward_options"),
    ],
)
def test_a_wrong_reward_or_option_is_refused_before_anything_is_sampled(
    rewards: None, made: dict[str, Any], says: str
) -> None:
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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ExitsInline", "raised SystemExit: 3"),
        ("ExitsInThread", "raised SystemExit: 3"),
        ("exits", "raised SystemExit: 3"),
        ("dies", r"its process died \(exit status 7\)"),
    ],
)
def test_a_reward_that_leaves_excludes_what_it_was_to_score_and_no_more(rewards: None, name: str, says: str) -> None:
    asked = prompt(f"scorer_rewards:{name}")
    with pytest.raises(RewardFailed, match=says):
        scored(Scorer(config(main={"reward": asked.reward})), asked)


def test_an_evaluation_has_its_own_reward_with_its_own_options_or_those_of_the_stream() -> None:
    stream = {"reward": "exact_match", "reward_options": {"strip": True}}
    own = {"reward": "expression", "reward_options": {"longest": 9}}
    for evaluation, value in (({}, 1.0), ({"reward": "exact_match"}, 0.0), (own, None)):
        scorer = Scorer(config(evaluation, main=stream))
        asked = prompt("exact_match", EVALUATION_STREAM)
        if value is not None:
            assert scored(scorer, asked, " 12 ")[0].value == value
        scorer.close()


@pytest.mark.parametrize("name", ["NoTime", "NoTimeInProcess"])
def test_options_without_a_time_of_their_own_have_that_of_all_rewards(rewards: None, name: str) -> None:
    asked = prompt(f"scorer_rewards:{name}")
    assert scored(Scorer(config(main={"reward": asked.reward})), asked)[0].value == 1.0


def test_what_is_said_of_a_reward_travels_as_text(rewards: None) -> None:
    asked = prompt("scorer_rewards:Says")
    assert "<function" in scored(Scorer(config(main={"reward": asked.reward})), asked)[0].detail


def test_a_reward_that_reads_takes_no_call_and_what_it_started_ends_with_it(
    rewards: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEFT", str(tmp_path / "left"))
    asked = prompt("scorer_rewards:reads")
    assert scored(Scorer(config(main={"reward": asked.reward})), asked)[0].value == 0.0
    asked = prompt("scorer_rewards:leaves")
    with pytest.raises(RewardFailed, match="did not return within 2 s"):
        scored(Scorer(config(main={"reward": asked.reward, "reward_options": {"timeout_seconds": 2}})), asked)
    left = Path("/proc") / (tmp_path / "left").read_text() / "status"
    for _ in range(100):
        if not left.exists() or "(zombie)" in left.read_text():
            return
        time.sleep(0.05)
    raise AssertionError("a process of a reward lives on")


def test_rewards_that_hang_in_threads_keep_nothing_else_from_its_thread(rewards: None) -> None:
    import scorer_rewards

    asked = prompt("scorer_rewards:Waits")
    scorer = Scorer(config(main={"reward": asked.reward, "reward_options": {"timeout_seconds": 0.1}}))

    async def play() -> list[Any]:
        hung = [scorer.score(asked, Completion("12", "stop")) for _ in range(40)]
        failed = await asyncio.gather(*hung, return_exceptions=True)
        return [*failed, await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10)]

    try:
        *failed, free = asyncio.run(play())
        assert free == "free" and all("did not return within 0.1 s" in str(f) for f in failed)
    finally:
        scorer_rewards.GATE.set()
        scorer.close()
