"""The environment ``gymnasium``: any Gymnasium environment with text, or with actions that have names.

Goes in: actions as text; comes out: observations as text, the environment's own rewards and ends. A Text or other free
action space gets the text as it is; a Discrete one a number, or the index of a name.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from headrace.pipeline.environments.actions import command_of
from headrace.pipeline.environments.environment import EnvironmentOptions, Observation
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Prompt

__all__ = ("Gymnasium", "GymnasiumOptions")


class GymnasiumOptions(EnvironmentOptions):
    """Options of ``gymnasium``."""

    id: str
    """What it is registered as, ``FrozenLake-v1``."""
    module: str = ""
    """A module that is imported first, to register it."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of ``gymnasium.make``."""
    actions: list[str] = Field(default_factory=list)
    """Names of a Discrete action space's numbers, in order."""
    instructions: str = ""
    """Stands before the first observation, after the prompt."""
    invalid_reward: float = 0.0
    """Reward of a text that is no action; the environment is not stepped then."""


class Gymnasium:
    """Any Gymnasium environment with text, or with actions that have names. Raises ConfigurationError."""

    Options = GymnasiumOptions

    def __init__(self, options: GymnasiumOptions) -> None:
        self._options = options
        try:
            gymnasium = importlib.import_module("gymnasium")
        except ImportError as error:
            raise ConfigurationError(f"environment gymnasium: {error}; pip install gymnasium") from error
        try:
            if options.module:
                importlib.import_module(options.module)
            self._environment: Any = gymnasium.make(options.id, **options.settings)
        except (ImportError, gymnasium.error.Error, TypeError) as error:
            raise ConfigurationError(f"environment gymnasium: {options.id}: {type(error).__name__}: {error}") from error
        self._discrete = isinstance(self._environment.action_space, gymnasium.spaces.Discrete)
        self._over = True

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        """The first observation, after the prompt's text and the instructions."""
        seen, info = self._environment.reset(seed=seed)
        self._over = False
        parts = [prompt.prompt, self._options.instructions, _shown(seen)]
        return Observation("\n".join(p for p in parts if p), details=_words(info))

    def step(self, action: str) -> Observation:
        """Act; a text that is no action is told what there is. Raises ValueError after the end."""
        if self._over:
            raise ValueError("the episode has ended: call reset first")
        chosen: Any = action
        if self._discrete:
            chosen = self._number(command_of(action))
            if chosen is None:
                names = ", ".join(self._options.actions) or f"0 to {self._environment.action_space.n - 1}"
                said = f"That is no action. Actions: {names}."
                return Observation(said, self._options.invalid_reward, details={"verdict": "no action"})
        seen, reward, terminated, truncated, info = self._environment.step(chosen)
        self._over = bool(terminated or truncated)
        return Observation(_shown(seen), float(reward), done=self._over, details=_words(info))

    def close(self) -> None:
        """End the episode; the environment itself is kept for the next."""
        self._over = True

    def _number(self, text: str) -> int | None:
        """The number of an action in a Discrete space."""
        space = self._environment.action_space
        names = self._options.actions
        if text in names:
            return int(space.start) + names.index(text)
        if text.lstrip("-").isdecimal() and space.contains(int(text)):
            return int(text)
        return None


def _shown(seen: Any) -> str:
    return seen if isinstance(seen, str) else str(seen.tolist() if hasattr(seen, "tolist") else seen)


def _words(info: Mapping[str, Any]) -> dict[str, str]:
    """What of an info is short text or a number."""
    return {str(k): str(v) for k, v in info.items() if isinstance(v, str | int | float) and len(str(v)) <= 200}
