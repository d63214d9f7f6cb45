"""Episodes of many turns: masks, merging, sub-agents, ends, and environments that fail."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_policy import RecordingPolicy, assert_sampled_in_context, chat_model

from headrace.connectors.engines.engine import PromptTooLong
from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.multi_turn import MultiTurn, episode_seed
from headrace.pipeline.workflows.workflow import EpisodeFailed, make_workflow
from headrace.schemas.checks import check_record
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Message, Reward, Sampling
from headrace.schemas.records import Prompt, Record, Task, Trajectory

END = "<|im_end|>"
SOURCE = """
import time
from headrace.pipeline.environments.environment import Observation

class Counts:
    isolation = "inline"
    def __init__(self, turns=3, agents=""):
        self.turns, self.agents = turns, agents
    def reset(self, seed, prompt):
        self.turn = 0
        return Observation(f"seed {seed}")
    def step(self, action):
        self.turn += 1
        kind = {"b": "begin", "e": "end"}.get(self.agents[self.turn - 1 : self.turn], "")
        return Observation(f"seen {self.turn}", 0.5, self.turn == self.turns, {"said": action[:10]}, kind)
    def close(self): pass

class Hangs(Counts):
    isolation = "process"
    def step(self, action): time.sleep(3600)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "turn_environments.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def task(examples: dict[str, Record]) -> Task:
    found: Any = examples["Task"]
    prompt = replace(found.prompt, messages=[], columns={}, prompt="go")
    return replace(found, sources=[], prompt=prompt, sampling=Sampling(max_new_tokens=60, seed=1))


class Judge:
    async def score(self, prompt: Prompt, completion: Completion, *, role: str = "") -> list[Reward]:
        return [Reward(name="judge", value=2.0)]


def play(
    task: Task, policy: RecordingPolicy, environment: str = "turn_environments:Counts", **options: Any
) -> Trajectory:
    made = make_workflow("multi_turn", {"environment": environment, **options})

    async def run() -> Trajectory:
        assert isinstance(made, MultiTurn)
        try:
            return await made.run(task, {0: policy}, Judge())
        finally:
            await made.close()

    trajectory = asyncio.run(run())
    check_record(trajectory)
    assert assert_sampled_in_context(trajectory.sequences, policy) == len(policy.calls)
    return trajectory


def test_all_turns_are_one_sequence_while_the_template_only_adds(folder: ModelFolder, task: Task) -> None:
    policy = RecordingPolicy(folder, lambda text: f"that{END}")
    made = play(task, policy, system="Act.")
    (sequence,) = made.sequences
    text = folder.detokenize(sequence.tokens)
    assert text.startswith("<|im_start|>system\nAct.<|im_end|>\n<|im_start|>user\nseed ")
    assert text.count("<|im_start|>user\nseen") == 2
    sampled = [folder.detokenize(sequence.tokens[sequence.versions == v]) for v in range(3)]
    assert sampled == [f"that{END}"] * 3, "template and observations have mask 0"
    assert made.reward == 1.5 and [(r.value, r.turn) for r in made.rewards] == [(0.5, 0), (0.5, 1), (0.5, 2), (1.5, -1)]
    assert json.loads(made.rewards[0].detail) == {"said": "that"}
    assert made.metrics == {"turns": 3.0, "sequences_per_trajectory": 1.0} and made.end_reason == "stop"


def test_thinking_that_the_template_drops_begins_another_sequence(folder: ModelFolder, task: Task) -> None:
    policy = RecordingPolicy(folder, lambda text: f"<think>hm</think>that{END}")
    made = play(task, policy)
    assert len(made.sequences) == 3
    assert [folder.detokenize(s.tokens).count("<think>") for s in made.sequences] == [1, 1, 1]
    tool = play(task, RecordingPolicy(folder, lambda text: f"<think>hm</think>that{END}"), observation_role="tool")
    assert len(tool.sequences) == 1, "after a tool this template keeps the thinking"


def test_the_text_form_adds_observations_as_they_are(folder: ModelFolder, task: Task) -> None:
    policy = RecordingPolicy(folder, lambda text: f"look</search> and more{END}")
    made = play(task, policy, form="text", stop=["</search>"])
    (sequence,) = made.sequences
    text = folder.detokenize(sequence.tokens)
    assert "more" not in text and "<|im_start|>" not in text and "seen 1" in text
    assert text.startswith("seed ") and text.endswith("</search>")


def test_sub_agents_have_contexts_of_their_own_and_report_back(folder: ModelFolder, task: Task) -> None:
    policy = RecordingPolicy(folder, lambda text: f"that{END}")
    made = play(task, policy, environment_options={"turns": 6, "agents": "-bb-e"}, system="Act.")
    texts = [folder.detokenize(s.tokens) for s in made.sequences]
    assert len(texts) == 3, "one for each agent, the outer ones go on where they were"
    assert [t.count("<|im_start|>assistant") for t in texts] == [2, 2, 2]
    assert texts[1].startswith("<|im_start|>system\nAct.<|im_end|>\n<|im_start|>user\nseen 2")
    assert "seen 1" not in texts[1]
    assert "seen 5" in texts[1] and "seen 5" not in texts[2]
    assert made.reward == 3.0


def test_sub_agents_below_the_depth_fail_by_name(folder: ModelFolder, task: Task) -> None:
    policy = RecordingPolicy(folder, lambda text: f"that{END}")
    with pytest.raises(EpisodeFailed, match=r"workflow_options\.depth is 1"):
        play(task, policy, environment_options={"turns": 6, "agents": "bb"}, depth=1)


def test_an_episode_ends_with_its_turns_or_its_context(folder: ModelFolder, task: Task) -> None:
    short = play(task, RecordingPolicy(folder, lambda text: f"that{END}"), turns=2, environment_options={"turns": 9})
    assert short.reward == 1.0 and short.status == "train"
    policy = RecordingPolicy(folder, lambda text: f"that{END}", context=60)
    full = play(task, policy, environment_options={"turns": 99}, turns=50)
    assert full.end_reason == "context_full" and full.status == "train" and full.tokens > 0
    with pytest.raises(PromptTooLong):
        play(task, RecordingPolicy(folder, lambda text: "x", context=3))


def test_a_hung_environment_fails_its_episode_in_time(folder: ModelFolder, task: Task) -> None:
    began = time.monotonic()
    with pytest.raises(EpisodeFailed, match=r"step did not return within 0\.5 s; its process was killed") as failed:
        play(task, RecordingPolicy(folder, lambda text: "x"), "turn_environments:Hangs", step_seconds=0.5)
    assert failed.value.end_reason == "env_timeout" and time.monotonic() - began < 15


def test_whose_rewards_count(folder: ModelFolder, task: Task) -> None:
    for rule, value in (("environment", 1.5), ("stream", 2.0), ("both", 3.5)):
        policy = RecordingPolicy(folder, lambda text: f"that{END}")
        assert play(task, policy, reward=rule).reward == value


def test_the_prompts_messages_come_first(folder: ModelFolder, task: Task) -> None:
    policy = RecordingPolicy(folder, lambda text: f"that{END}")
    chat = replace(task, prompt=replace(task.prompt, messages=[Message(role="user", content="help me")]))
    text = folder.detokenize(play(chat, policy).sequences[0].tokens)
    assert text.startswith("<|im_start|>user\nhelp me<|im_end|>\n<|im_start|>user\nseed ")


def test_the_seed_is_the_groups_and_every_evaluations(task: Task) -> None:
    one = episode_seed(task)
    assert one == episode_seed(replace(task, replica=5, attempt=2, group=9)) and one >= 0
    assert one != episode_seed(replace(task, prompt=replace(task.prompt, epoch=1)))
    late = replace(task, kind="eval", prompt=replace(task.prompt, epoch=4))
    assert episode_seed(late) == episode_seed(replace(task, kind="eval"))
    assert episode_seed(replace(task, prompt=replace(task.prompt, columns={"seed": "-12"}))) == -12


def test_a_world_that_is_played_to_its_end(folder: ModelFolder, task: Task) -> None:
    """A policy that reads what it sees solves the arithmetic environment through tokens alone."""

    def solves(text: str) -> str:
        question = text.rpartition("user\n")[2].partition("=")[0]
        at = max(question.rfind("+"), question.rfind("-"))
        return f"{int(question[:at]) + int(question[at:])}{END}"

    made = play(task, RecordingPolicy(folder, solves), "arithmetic", environment_options={"turns": 4})
    assert made.reward == 4.0 and len(made.sequences) == 1


@pytest.mark.parametrize("options", [{}, {"environment": "arithmetic", "turn": 3}, {"environment": "none_such"}])
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        make_workflow("multi_turn", options)
