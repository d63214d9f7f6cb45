"""The engine as the rollout worker sees it: token ids in; tokens, behave log-probs and the version of each token out.

An engine is stepped by its owner and has no thread of its own: between two steps requests enter and leave and weights
are swapped, so the version that labels a token is always the one whose weights sampled it (protocol 4, 5). The
log-probs are those of the distribution that was sampled from (logits divided by the temperature).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from headrace.schemas.errors import ConfigurationError, HeadraceError
from headrace.schemas.parts import Sampling

__all__ = ("Engine", "Generation", "PromptTooLong", "Request", "WeightsRefused", "generate", "neutral", "options_of")


class PromptTooLong(HeadraceError, ValueError):
    """A prompt over ``max_prompt_tokens`` or without room for one token in the model's context; never sampled."""


class WeightsRefused(ConfigurationError):
    """Weights that do not fit the engine's model: a missing or unknown tensor, another shape. Nothing was loaded."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to sample.

    key: the caller's own, unique among those in the engine. prompt: int32 token ids, one-dimensional, at least one.
    sampling: effective parameters; the tokens depend on ``sampling.seed``, the prompt and the weights alone, never on
    what else is in the batch.
    """

    key: int
    prompt: npt.NDArray[np.int32]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled for a request; four arrays of one length, without the prompt.

    tokens: int32. logprobs: float32 in nats. versions: int32, the policy version of each token. end_reason: stop,
    length, context_full or abort (``records.END_REASONS``).
    """

    key: int
    end_reason: str
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))


class Engine(Protocol):
    """Samples from one policy. Every method is called from one thread."""

    @property
    def version(self) -> int:
        """Version of the weights in force; -1 before the first ``load_weights``."""
        ...

    @property
    def capacity(self) -> int:
        """Sequences that are decoded at once; more wait inside the engine."""
        ...

    @property
    def active(self) -> int:
        """Sequences inside, waiting ones included."""
        ...

    def add(self, request: Request) -> None:
        """Take a request; it is first sampled in the next step. Raises PromptTooLong."""
        ...

    def step(self) -> list[Generation]:
        """Sample one token for every running sequence; returns those that ended in this step."""
        ...

    def abort(self, key: int) -> Generation | None:
        """Drop a request and return what it has so far (end reason abort); None when it is not inside."""
        ...

    def load_weights(self, weights: Mapping[str, npt.NDArray[Any]], version: int) -> None:
        """Put the weights of ``version`` in force, whole or not at all; running sequences go on with them.

        weights: checkpoint name -> array; uint16 holds the bits of bfloat16, float arrays are values. The arrays are
        copied. Raises WeightsRefused.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


Options = TypeVar("Options", bound=BaseModel)


def options_of(model: type[Options], engine: str, given: Mapping[str, Any] | None) -> Options:
    """``[rollout.options]`` as an engine's own model. Raises ConfigurationError that names the key."""
    try:
        return model.model_validate(dict(given or {}))
    except ValidationError as error:
        raise ConfigurationError(f"rollout.options for engine {engine}: {error}") from error


def neutral(sampling: Sampling) -> bool:
    """Whether the sampled distribution is the policy's own at some temperature, so that its tokens may be trained."""
    return sampling.temperature > 0 and sampling.top_p >= 1 and sampling.top_k == 0


def generate(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """Run requests to their ends and return them in the order given."""
    for request in requests:
        engine.add(request)
    done: dict[int, Generation] = {}
    while len(done) < len(requests):
        done.update((generation.key, generation) for generation in engine.step())
    return [done[request.key] for request in requests]
