"""Policies that say what a test tells them to, for workflows with roles: one letter is one token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.connectors.engines.engine import Generation, PromptTooLong
from headrace.pipeline.rewards.reward import Completion, RewardFailed
from headrace.pipeline.workflows.workflow import Workflow, make_workflow
from headrace.schemas.parts import PolicyBound, Reward, Sampling
from headrace.schemas.records import Prompt, Task, Trajectory

TOO_LONG, NOTHING, CUT, BROKEN = "\0long", "\0nothing", "\0cut:", "\0nan"
"""Instead of an answer: the prompt is refused, no token comes, the limit cuts it off, a log-prob is no number."""


@dataclass
class Player:
    """A policy's session: ``says`` gives its answer to a prompt's text."""

    policy: int
    says: Callable[[str], str]
    version: int = 3
    asked: list[str] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)

    def encode(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        self.prompts.append(prompt)
        text = prompt.prompt or "".join(f"<{m.role}>{m.content}" for m in prompt.messages)
        return np.array([ord(letter) for letter in text], np.int32)

    def decode(self, tokens: npt.NDArray[np.int32]) -> str:
        return "".join(chr(t) for t in tokens if t != 2)

    def render(self, messages: Any, tools: Any = ()) -> str:
        raise AssertionError("workflows with roles ask by Prompt")

    tokenize = detokenize = render

    async def generate(self, prompt: npt.NDArray[np.int32], sampling: Sampling) -> Generation:
        text = "".join(map(chr, prompt))
        self.asked.append(text)
        self.samplings.append(sampling)
        answer = self.says(text)
        if answer == TOO_LONG:
            raise PromptTooLong(f"the prompt has {prompt.size} tokens")
        end = "length" if answer.startswith(CUT) else "abort" if answer == NOTHING else "stop"
        letters = [ord(letter) for letter in answer.removeprefix(CUT).removeprefix(NOTHING)] + [2] * (end == "stop")
        logprobs = np.full(len(letters), np.nan if answer == BROKEN else -0.5, np.float32)
        return Generation(
            0, end, np.array(letters, np.int32), logprobs, np.full(len(letters), self.version, np.int32)
        )


class Marks:
    """The stream's reward: what ``marks`` says of a text, else 1 for ``right`` and 0 for anything else."""

    def __init__(self, marks: Mapping[str, float] | None = None) -> None:
        self.marks = marks or {}
        self.scored: list[tuple[str, str, str]] = []

    async def score(self, prompt: Prompt, completion: Completion, *, role: str = "") -> list[Reward]:
        self.scored.append((role, completion.text, prompt.answer))
        if completion.text == "raises":
            raise RewardFailed("no judge today")
        value = self.marks.get(completion.text, float(completion.text == "right"))
        return [Reward(name="mark", value=value if completion.end_reason == "stop" else 0.0, role=role)]


def workflow(name: str, options: Mapping[str, Any], policies: Mapping[str, int]) -> Workflow:
    """A workflow whose prompts are its role's name and what it is shown."""
    return make_workflow(name, options, policies)


def earned(trajectory: Trajectory) -> dict[str, float]:
    """What every role earned; the outcome as ``outcome``."""
    parts = {part.role or part.name: part.value for part in trajectory.rewards}
    return {**parts, "outcome": trajectory.reward}


def task_of(task: Task, *policies: int, **prompt: Any) -> Task:
    """A task of these policies, with a question."""
    asked = replace(task.prompt, **{"prompt": "q", "messages": [], "answer": "hidden", "columns": {}, **prompt})
    return replace(task, prompt=asked, policies=[PolicyBound(policy=p, min_version=0) for p in policies], sources=[])
