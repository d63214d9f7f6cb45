"""Roles of one episode: who plays them, what they are asked, what they said, and the trajectory that it adds up to.

A workflow with roles names their order, what each is shown, and what each earns; the rest is here. A role that cannot
be asked, is cut off or says nothing has said nothing usable: its workflow has a verdict for that, and the episode goes
on. Only what the first solver samples has to exist, since without it there is nothing to judge.
"""

import asyncio
import re
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from headrace.connectors.engines.engine import PromptTooLong
from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.workflow import (
    EXCLUDING,
    EpisodeFailed,
    PolicySession,
    Scoring,
    WorkflowOptions,
    sequence_of,
    trajectory_of,
    with_seed,
)
from headrace.schemas import parts
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Message, Reward
from headrace.schemas.records import Prompt, Task, Trajectory

__all__ = ("Episode", "RoleOptions", "Said", "TeamOptions", "beside", "code_of", "filled", "policies_of")

_PLACE = re.compile(r"\{([a-z_]+)\}")
_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
PLACES = ("question", "attempt", "feedback", "candidate_a", "candidate_b", "count")
"""What ``{...}`` in a role's prompt may stand for; which of them are filled depends on the workflow."""
_A = TypeVar("_A")
_B = TypeVar("_B")


class RoleOptions(BaseModel):
    """One role: ``[streams.S.workflow_options.ROLE]``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    policy: str = ""
    """Who plays it; empty: the stream's first policy solves, its second (or only) one does the rest."""
    prompt: str
    """What it is asked; ``{question}`` and what else the workflow says are filled in."""
    system: str = ""
    """Said before it: a system message in a chat, else a paragraph of its own."""
    max_new_tokens: int = Field(0, ge=0)
    """0: ``rollout.max_new_tokens``."""
    temperature: float = Field(-1.0, ge=-1)
    """-1: ``rollout.temperature``; at 0 its answers are not trained."""

    @field_validator("prompt", "system")
    @classmethod
    def _places_are_known(cls, text: str) -> str:
        for name in _PLACE.findall(text):
            if name not in PLACES:
                raise ValueError(f"{{{name}}} stands for nothing; there are {', '.join(f'{{{p}}}' for p in PLACES)}")
        return text


class TeamOptions(WorkflowOptions):
    """What all workflows with roles know.

    rewards: ``roles`` pays each role for its own part, ``outcome`` pays all of them 1 or 0 for the final answer. form:
    ``as_given`` asks in the form of the row's prompt, ``chat`` and ``text`` in that form. shows: what others see of an
    answer: its ``text``, or the last fenced ``code`` block of at least ``least_code`` characters, else nothing.
    """

    rewards: Literal["roles", "outcome"] = "roles"
    form: Literal["as_given", "chat", "text"] = "as_given"
    shows: Literal["text", "code"] = "text"
    least_code: int = Field(20, ge=0)


@dataclass(frozen=True, slots=True)
class Said:
    """What a role said: text, how it ended, tokens, and its sequence; without a sequence it has said nothing."""

    role: str
    text: str
    end_reason: str
    completion: Completion
    sequence: parts.Sequence | None


def policies_of(
    roles: Mapping[str, RoleOptions], policies: Mapping[str, int], like: Mapping[str, str]
) -> dict[str, int]:
    """The policy of each role. ``roles`` begin with the solver; ``like``: roles that are played by another's policy
    unless they name their own. Raises ConfigurationError for a policy that the stream lacks, or that plays nothing.
    """
    names = list(policies)
    out: dict[str, int] = {}
    for number, (role, options) in enumerate(roles.items()):
        name = options.policy or (names[min(number, 1, len(names) - 1)] if role not in like else "")
        if name and name not in policies:
            told = ", ".join(names) or "none"
            raise ConfigurationError(
                f"streams.S.workflow_options.{role}.policy names {name!r}; policies of the stream are {told}"
            )
        out[role] = policies[name] if name else out[like[role]]
    idle = [name for name, index in policies.items() if index not in out.values()]
    if idle:
        raise ConfigurationError(
            f"policy {idle[0]!r} of the stream plays no role: give it one, or leave it out of streams.S.policies"
        )
    return out


def filled(template: str, values: Mapping[str, str]) -> str:
    """A template with its places filled, each once: what a model wrote is never looked at for places.

    >>> filled("{question} {feedback}", {"question": "{feedback}?", "feedback": "no"})
    '{feedback}? no'
    """
    return _PLACE.sub(lambda found: values.get(found[1], found[0]), template)


def code_of(text: str, least: int) -> str:
    """The last fenced block of at least ``least`` characters, else nothing.

    >>> code_of("so:" + chr(10) + "```python" + chr(10) + "print(1)" + chr(10) + "```", 4)
    'print(1)'
    """
    blocks = [block.strip() for block in _FENCED.findall(text)]
    return next((block for block in reversed(blocks) if len(block) >= least), "")


async def beside(first: Coroutine[Any, Any, _A], second: Coroutine[Any, Any, _B]) -> tuple[_A, _B]:
    """Both at once; when one fails, the other ends with it."""
    one, two = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        return await asyncio.gather(one, two)
    finally:
        one.cancel()
        two.cancel()


class Episode:
    """One episode of a team. ``who`` is the policy of each role, ``roles`` are their options."""

    def __init__(
        self,
        task: Task,
        engines: Mapping[int, PolicySession],
        scoring: Scoring,
        *,
        options: TeamOptions,
        roles: Mapping[str, RoleOptions],
        who: Mapping[str, int],
    ) -> None:
        self.task = task
        self.prompt = task.prompt
        self.question = task.prompt.prompt or _question(task.prompt)
        self.metrics: dict[str, float] = {}
        self._engines, self._scoring, self._options = engines, scoring, options
        self._roles, self._who = roles, who
        self._said: list[Said] = []
        self._began = time.time_ns() // 1_000_000

    async def ask(
        self, role: str, values: Mapping[str, str] | None = None, *, like: str = "", needed: bool = False
    ) -> Said:
        """Let a role answer. ``like``: the role whose options and policy it has, when it has none of its own.

        A prompt that is too long, or an answer without a token, gives a Said without a sequence; with ``needed`` it
        raises PromptTooLong or EpisodeFailed, as an answer that the engine broke off always does.
        """
        options, policy = self._roles[like or role], self._who[like or role]
        engine = self._engines[policy]
        sampling = with_seed(self.task.sampling, f"{self.task.sampling.seed} {role}")
        if options.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=options.max_new_tokens)
        if options.temperature >= 0:
            sampling = replace(sampling, temperature=options.temperature)
        try:
            tokens = engine.encode(self._prompt_of(role, like or role, options, values))
            generation = await engine.generate(tokens, sampling)
        except PromptTooLong:
            if needed:
                raise
            return self._silent(role, "context_full")
        if generation.end_reason in EXCLUDING and generation.tokens.size:
            raise EpisodeFailed(f"{role}: the engine ended it with {generation.end_reason}", generation.end_reason)
        if not generation.tokens.size and not needed:
            return self._silent(role, "stop")
        sequence = sequence_of(policy, role, tokens, generation, sampling)
        text = engine.decode(generation.tokens)
        completion = Completion(text, generation.end_reason, generation.tokens)
        said = Said(role, text, generation.end_reason, completion, sequence)
        self._said.append(said)
        return said

    async def score(self, said: Said, *, prompt: Prompt | None = None) -> list[Reward]:
        """The stream's reward of what a role said, as parts of that role. Raises RewardFailed."""
        return await self._scoring.score(prompt or self.prompt, said.completion, role=said.role)

    def shown(self, said: Said) -> str:
        """What the others see of an answer."""
        return said.text if self._options.shows == "text" else code_of(said.text, self._options.least_code)

    def count(self, **metrics: float | bool) -> None:
        """Figures of the episode for the report."""
        self.metrics.update({name: float(value) for name, value in metrics.items()})

    def ended(self, outcome: float, earned: Sequence[Reward]) -> Trajectory:
        """The trajectory. ``outcome``: what the final answer earned; ``earned``: what the roles did, by parts.

        Parts of roles that said nothing are left out: there is nothing of them to train.
        """
        sequences = [said.sequence for said in self._said if said.sequence is not None]
        roles = {sequence.role for sequence in sequences}
        rewards = [part for part in earned if part.role in roles]
        if self._options.rewards == "outcome":
            outcome = float(outcome > 0.5)
            rewards = [Reward(name="outcome", value=outcome)]
        ends = {sequence.end_reason for sequence in sequences}
        return trajectory_of(
            self.task,
            sequences,
            rewards,
            started_ms=self._began,
            prompt_text=self.question,
            completion_text="\n".join(f"[{said.role}] {said.text}" for said in self._said),
            end_reason="length" if "length" in ends else "stop",
            reward=outcome,
            metrics=self.metrics,
        )

    def _silent(self, role: str, end_reason: str) -> Said:
        return Said(role, "", end_reason, Completion("", end_reason, np.empty(0, np.int32)), None)

    def _prompt_of(self, role: str, like: str, options: RoleOptions, values: Mapping[str, str] | None) -> Prompt:
        known = {"question": self.question, **(values or {})}
        system, text = filled(options.system, known), filled(options.prompt, known)
        # Replicas share what depends on the row alone; what depends on an answer is not remembered.
        name = f"{self.prompt.prompt_id}/{like}" if values is None and self.prompt.prompt_id else ""
        if self._options.form == "text" or (self._options.form == "as_given" and not self.prompt.messages):
            whole = f"{system}\n\n{text}" if system else text
            return replace(self.prompt, prompt_id=name, prompt=whole, messages=[])
        before = [m for m in self.prompt.messages[:-1] if m.role != "system" or not system]
        messages = [*([Message(role="system", content=system)] if system else []), *before]
        return replace(self.prompt, prompt_id=name, prompt="", messages=[*messages, Message(role="user", content=text)])


def _question(prompt: Prompt) -> str:
    return prompt.messages[-1].content if prompt.messages else ""
