"""The contract of an environment: text observations in, text actions out, every episode decided by its seed.

A workflow drives it: ``reset``, then ``step`` until ``done``, then ``close``. An environment holds one episode at a
time and keeps nothing outside itself, so that a hung one can be killed with its process and replaced.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.connectors.plugins import load
from headrace.schemas.errors import ConfigurationError, HeadraceError
from headrace.schemas.records import Prompt

__all__ = (
    "Environment",
    "EnvironmentFailed",
    "EnvironmentOptions",
    "Observation",
    "guarded",
    "make_environment",
    "observed",
)

T = TypeVar("T")

_MOST_CHARACTERS = 4 << 20
"""Of an observation: no context holds more, and the worker stands still while a text is tokenised."""


class EnvironmentFailed(HeadraceError):
    """An environment raised, hung or died; ``end_reason`` is env_error or env_timeout."""

    def __init__(self, message: str, end_reason: str = "env_error") -> None:
        super().__init__(message)
        self.end_reason = end_reason


class EnvironmentOptions(BaseModel):
    """Settings of an environment's own; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows: text for the policy, reward of the last action, whether the episode has ended.

    ``details`` are kept with the reward of the turn: verdicts and other words for people. ``agent``: ``begin`` gives
    the policy a fresh context that starts with ``text``, for a sub-task in the same episode; ``end`` returns to the
    context from which the present one was begun, where ``text`` follows.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    details: Mapping[str, str] = field(default_factory=dict)
    agent: Literal["", "begin", "end"] = ""


class Environment(Protocol):
    """One episode at a time.

    A class with an attribute ``Options`` (a model over EnvironmentOptions) is made from an instance of it, any other
    from its options as keywords. ``isolation = "inline"`` runs it in the worker, for what takes microseconds and cannot
    hang; otherwise it has a process of its own. ``tools``, where there is one, are OpenAI tool definitions for the
    policy's chat template.
    """

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        """Begin an episode; equal seed and prompt give the equal episode."""
        ...

    def step(self, action: str) -> Observation:
        """Act. Calling it after ``done`` raises ValueError."""
        ...

    def close(self) -> None:
        """Free what the episode holds; may be called twice."""
        ...


def guarded(name: str, what: str, call: Callable[..., T], *arguments: Any) -> T:
    """The result of a call of an environment's. Raises EnvironmentFailed for whatever it raises."""
    try:
        return call(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the seam to environments: what a plug-in raises ends its episode and no other
        raise EnvironmentFailed(f"environment {name}: {what} raised {type(error).__name__}: {error}") from error


def observed(name: str, what: str, value: object) -> Observation:
    """What a call returned, in plain types that can travel. Raises EnvironmentFailed for what is no Observation."""
    if not isinstance(value, Observation):
        raise EnvironmentFailed(f"environment {name}: {what} returned {value!r:.100}, no Observation")
    made = guarded(name, f"the answer of {what}", _plain, value)
    problem = ""
    if not math.isfinite(made.reward):
        problem = f"reward {made.reward}: a reward is a finite number"
    elif made.agent not in ("", "begin", "end"):
        problem = f"agent {made.agent!r}: it is empty, begin or end"
    elif len(made.text) > _MOST_CHARACTERS:
        problem = f"a text of {len(made.text)} characters, at most {_MOST_CHARACTERS} are taken"
    if problem:
        raise EnvironmentFailed(f"environment {name}: {what} returned {problem}")
    return made


def _plain(seen: Observation) -> Observation:
    if not isinstance(seen.text, str):
        raise TypeError(f"the text is {seen.text!r:.100}")
    if isinstance(seen.reward, str | bytes):
        raise TypeError(f"the reward is {seen.reward!r:.100}")
    seen.text.encode("utf-8")  # half a surrogate pair cannot be tokenised
    details = json.loads(json.dumps(dict(seen.details), default=str))
    return Observation(seen.text, float(seen.reward), bool(seen.done), details, seen.agent)


def make_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """The environment behind a name with its options. Raises ConfigurationError for unknown names and options."""
    found = load("headrace.environments", name)
    model = getattr(found, "Options", None)
    try:
        made: Environment = found(model.model_validate(dict(options))) if model is not None else found(**options)
    except (ValidationError, TypeError) as error:
        raise ConfigurationError(f"environment_options for environment {name!r}: {error}") from error
    except HeadraceError:
        raise
    except Exception as error:  # the seam to environments: one that cannot be made is refused by its name
        raise ConfigurationError(f"environment {name!r} cannot be made: {type(error).__name__}: {error}") from error
    return made
