"""The contract of a reward, a prompt and a completion in and a number out, and the one place that calls it.

A reward may do anything: raise, hang, crash its process, return nonsense. ``call_reward`` turns all of it into
RewardFailed; ``scorer.Scorer`` adds the deadline. A failed reward excludes its trajectory, it never counts as 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.connectors.plugins import load
from headrace.schemas.errors import ConfigurationError, HeadraceError
from headrace.schemas.records import Prompt

__all__ = (
    "Completion",
    "Graded",
    "GroupReward",
    "Reward",
    "RewardFailed",
    "RewardOptions",
    "call_group_reward",
    "call_reward",
    "load_reward",
)

Isolation = Literal["process", "inline", "thread"]


class RewardFailed(HeadraceError):
    """A reward raised, hung, died, or returned what is no finite number; the message names the reward."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled for a prompt: text without special tokens, token ids (int32), and why it ended."""

    text: str
    end_reason: str
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))


class Graded(dict[str, float]):
    """Named parts of a reward, and for some of them what is to be said of it, such as a verdict."""

    def __init__(self, parts: Mapping[str, float], details: Mapping[str, str] | None = None) -> None:
        super().__init__(parts)
        self.details = {str(part): str(said) for part, said in (details or {}).items()}


class RewardOptions(BaseModel):
    """``streams.S.reward_options``; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    timeout_seconds: float = Field(10.0, gt=0)
    """Time for one call; a reward in a process of its own is killed then."""


class Reward(Protocol):
    """A reward plug-in: a class made from its ``Options``, or a plain function ``(prompt, completion)``.

    scope: trajectory, or group for what compares the members of a group (``GroupReward``). isolation: ``process``
    (default) runs it in a process of its own that is killed when it hangs; ``inline`` runs it between two decode steps,
    for what takes microseconds and cannot hang; ``thread`` for what waits for a server with time-outs of its own.
    """

    Options: ClassVar[type[RewardOptions]] = RewardOptions
    scope: ClassVar[Literal["trajectory", "group"]] = "trajectory"
    isolation: ClassVar[Isolation] = "process"

    def __call__(self, prompt: Prompt, completion: Completion) -> float | Mapping[str, float]:
        """The reward, or named parts of it; a single number bears the reward's name."""
        ...


def load_reward(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The reward behind a name with its options. Raises ConfigurationError for unknown names and options."""
    found = load("headrace.rewards", name)
    if not isinstance(found, type):
        return found  # type: ignore[no-any-return]
    made: type[Any] = found
    model: type[BaseModel] = getattr(made, "Options", RewardOptions)
    try:
        reward: Callable[..., Any] = made(model.model_validate(dict(options)))
    except ValidationError as error:
        raise ConfigurationError(f"streams.S.reward_options for reward {name!r}: {error}") from error
    except HeadraceError:
        raise
    except Exception as error:  # the seam to rewards: one that cannot be made is refused by its name
        raise ConfigurationError(f"reward {name!r} cannot be made: {type(error).__name__}: {error}") from error
    return reward


def call_reward(name: str, reward: Callable[..., Any], prompt: Prompt, completion: Completion) -> Graded:
    """Named parts of a reward, all finite. Raises RewardFailed whatever goes wrong."""
    return _parts(name, _called(name, reward, prompt, completion))


class GroupReward(Protocol):
    """A reward that compares the completions of one prompt: judges, rankings, diversity."""

    Options: ClassVar[type[RewardOptions]] = RewardOptions
    scope: ClassVar[Literal["trajectory", "group"]] = "group"
    isolation: ClassVar[Isolation] = "process"

    def __call__(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Sequence[float | Mapping[str, float] | RewardFailed]:
        """A reward for each, in order; RewardFailed for one that could not be judged, which excludes it alone."""
        ...


def call_group_reward(
    name: str, reward: Callable[..., Any], prompt: Prompt, completions: Sequence[Completion]
) -> list[Graded | RewardFailed]:
    """The parts of every completion, or why it has none. Raises RewardFailed when the whole group has none."""
    values = _called(name, reward, prompt, completions)
    if not isinstance(values, Sequence) or len(values) != len(completions):
        raise RewardFailed(f"reward {name} gave {repr(values)[:100]} for {len(completions)} completions: one for each")
    out: list[Graded | RewardFailed] = []
    for value in values:
        try:
            out.append(value if isinstance(value, RewardFailed) else _parts(name, value))
        except RewardFailed as error:
            out.append(error)
    return out


def _called(name: str, reward: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return reward(*arguments)
    except RewardFailed as error:
        raise RewardFailed(f"reward {name}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the seam to rewards: any failure of one excludes what it was to score, no more
        raise RewardFailed(f"reward {name} raised {type(error).__name__}: {error}") from error


def _parts(name: str, value: Any) -> Graded:
    parts = dict(value) if isinstance(value, Mapping) else {name: value}
    out = {}
    for part, number in parts.items():
        if (finite := _finite(number)) is not None:
            out[str(part)] = finite
        else:
            what = f"reward {name}" if part == name else f"reward {name}, part {part}"
            shown = "an integer too large for a float" if isinstance(number, int) else repr(number)[:100]
            raise RewardFailed(f"{what} returned {shown}: a reward is a finite number")
    if not out:
        raise RewardFailed(f"reward {name} returned no part")
    return Graded(out, value.details if isinstance(value, Graded) else None)


def _finite(value: object) -> float | None:
    """A real number as a float; None for what is none, is not finite, or is too large for a float."""
    if not isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
