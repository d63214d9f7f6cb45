"""What an operator before rollout is: it decides which prompts become groups, and learns what became of them.

In: the prompt that would be admitted next, outcomes of groups, new versions. Out: admitted, or dropped by a name. These
operators run in ``schedule``, at the moment when a worker has room, so that a decision knows everything learned so far.
Like all operators they are pure: records, their own state, their context, and draws that are hashes, never a clock.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar, Literal, Protocol

from pydantic import Field

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.runtime.stage import Metrics, Store
from headrace.schemas.config import PolicyConfig, RunConfig, StreamConfig
from headrace.schemas.records import Prompt

__all__ = (
    "Candidate",
    "Outcome",
    "PromptConfiguration",
    "PromptContext",
    "PromptKind",
    "PromptOperator",
    "SettingsOperator",
    "class_of",
    "draw",
)

PromptKind = Literal["settings", "prompt"]
"""``settings`` changes sections of the configuration and stands before ``prompt``, which decides on prompts."""


class PromptConfiguration(OperatorConfiguration):
    """``max_skips``: prompts dropped one after the other after which the next one is admitted all the same, so that a
    set on which everything is dropped cannot stop a run; 0: never.
    """

    max_skips: int = Field(256, ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A prompt that would be admitted now. ``in_flight``: open groups of the same prompt with no outcome yet."""

    prompt: Prompt
    in_flight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a group brought: raw rewards of its counted members, by replica. Incomplete groups have fewer of them."""

    group: int
    prompt: Prompt
    rewards: tuple[float, ...]
    complete: bool


class PromptContext(Protocol):
    """What an operator before rollout may use; ``process`` ends with exactly one ``admit`` or ``drop``."""

    metrics: Metrics
    seed: int
    """``run.seed``."""

    def store(self) -> Store:
        """The operator's own state; commits with the decision that it was made in."""
        ...

    def admit(self) -> None:
        """Pass the prompt on to the next operator, and at last to admission."""
        ...

    def drop(self, reason: str, detail: str) -> None:
        """Skip the prompt for this epoch, by a named reason, with the numbers that decided it in words."""
        ...


class PromptOperator:
    """Base of operators of kind ``prompt``: passes everything on and learns nothing. Override what is needed."""

    kind: ClassVar[PromptKind] = "prompt"
    Configuration: ClassVar[type[OperatorConfiguration]] = PromptConfiguration

    def check(self, streams: Sequence[str], config: RunConfig) -> None:
        """Raise ConfigurationError when the operator cannot work on these streams of a run."""

    def open(self, context: PromptContext) -> None:
        """Build the view from the store; called once before anything else."""

    def select(self, present: Sequence[str], absent: Collection[str]) -> Sequence[str]:
        """Streams in the order in which their first prompts are tried; what is left out waits.

        present: streams with a prompt that may be admitted now, longest waiting first. absent: streams without one
        that have not ended.
        """
        return present

    def process(self, candidate: Candidate, context: PromptContext) -> None:
        """Decide on one prompt."""
        context.admit()

    def admitted(self, candidate: Candidate, context: PromptContext) -> None:
        """The prompt has passed every operator and is a group now. Not called for a failed group's second admission."""

    def outcome(self, outcome: Outcome, context: PromptContext) -> None:
        """A group has closed; called at most once for each group, whatever the number of policies."""

    def moved(self, version: int, context: PromptContext) -> None:
        """The policy that the operator goes by has a new version."""


class SettingsOperator:
    """Base of operators of kind ``settings``: they have no state and change sections of the configuration."""

    kind: ClassVar[PromptKind] = "settings"
    Configuration: ClassVar[type[OperatorConfiguration]] = OperatorConfiguration

    def look_at(self, config: RunConfig) -> None:
        """The run that the sections are of, for who goes by more than a section; called before the others."""

    def policy(self, name: str, section: PolicyConfig) -> PolicyConfig:
        """The section of a policy as it shall be. Raises ConfigurationError for what cannot be."""
        return section

    def stream(self, name: str, section: StreamConfig) -> StreamConfig:
        """The section of a stream as it shall be. Raises ConfigurationError for what cannot be."""
        return section


def draw(seed: int, prompt: Prompt, number: int = 0) -> float:
    """A uniform number of [0, 1) for one offer of a prompt: the same for the same run seed, prompt and position.

    The position in the stream says which attempt it is: it grows by one with every prompt that a source offers. The
    seed stands for the run, and not its id, so that one seed gives one run.
    """
    text = f"{seed}/{prompt.stream}/{prompt.prompt_id}/{prompt.position}/{number}"
    return (int.from_bytes(sha256(text.encode()).digest()[:8], "big") >> 11) / (1 << 53)


def class_of(prompt: Prompt, by: str) -> str:
    """The class of a prompt: ``dataset``, ``task_type``, or the name of a column; empty when it has none."""
    if by in ("dataset", "task_type"):
        return str(getattr(prompt, by))
    return prompt.columns.get(by, "")
