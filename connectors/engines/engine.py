"""The engine as the rollout worker sees it: token ids in; tokens, behave log-probs and the version of each token out.

An engine is stepped by its owner and has no thread of its own: between two steps requests enter and leave and weights
are swapped, so the version that labels a token is always the one whose weights sampled it (protocol 4, 5). The
log-probs are those of the distribution that was sampled from (logits divided by the temperature).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from headrace.schemas.errors import ConfigurationError, HeadraceError
from headrace.schemas.parts import Sampling

__all__ = (
    "Engine",
    "EngineFailed",
    "Generation",
    "PromptTooLong",
    "Request",
    "WeightsRefused",
    "changes",
    "check_request",
    "generate",
    "neutral",
    "options_of",
    "refuse_extra",
    "unusable",
)


class PromptTooLong(HeadraceError, ValueError):
    """A prompt over ``max_prompt_tokens`` or without room for one token in the model's context; never sampled."""


class WeightsRefused(ConfigurationError):
    """Weights that do not fit the engine's model: a missing or unknown tensor, another shape. Nothing was loaded."""


class EngineFailed(HeadraceError):
    """An engine that can sample nothing more; its worker ends, and its tasks are issued again elsewhere."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to sample.

    key: the caller's own, unique among those in the engine. prompt: int32 token ids, one-dimensional, at least one.
    sampling: effective parameters; the tokens depend on ``sampling.seed``, the prompt and the weights alone, never on
    what else is in the batch. made: how many ids at the end of ``prompt`` are tokens of this completion that were
    sampled before it was broken off; they count towards ``sampling.max_new_tokens``, and no random number that chose
    one of them is used again.
    """

    key: int
    prompt: npt.NDArray[np.int32]
    sampling: Sampling
    made: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled for a request; three arrays of one length, without the prompt and what was made before.

    tokens: int32. logprobs: float32 in nats. versions: int32, the policy version of each token. end_reason: stop,
    length, context_full or abort (``records.END_REASONS``). known: whether all three are true of the policy; an engine
    that cannot tell gives -1 as versions, and what it sampled is never trained. error: empty, or why the engine refused
    the request after it had taken it (end reason abort).
    """

    key: int
    end_reason: str
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    known: bool = True
    error: str = ""


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
        """Sample one token for every running sequence, or see what was sampled; returns those that have ended.

        Returns soon, with nothing, when nothing has ended. Raises EngineFailed when the engine is lost.
        """
        ...

    def abort(self, key: int) -> Generation | None:
        """Drop a request and return what it has so far (end reason abort); None when it is not inside.

        One that has ended and was not returned by ``step`` yet is returned as it ended.
        """
        ...

    def abort_all(self) -> list[Generation]:
        """The same for every request inside, in no order."""
        ...

    def pause(self) -> None:
        """Sample nothing until ``resume``; requests and weights are taken all the same."""
        ...

    def resume(self) -> None:
        """Go on after ``pause``."""
        ...

    def load_weights(self, weights: Mapping[str, npt.NDArray[Any]], version: int) -> None:
        """Put the weights of ``version`` in force, whole or not at all; running sequences go on with them.

        weights: checkpoint name -> array; uint16 holds the bits of bfloat16, float arrays are values. They must stay
        unchanged until the next call. Nothing computed with older weights is used for a request that enters later.
        Raises WeightsRefused.
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


def check_request(request: Request, most: int, context: int, vocabulary: int = 1 << 31) -> None:
    """Raise PromptTooLong for a prompt over ``most`` tokens or without room in the model's ``context``.

    Raises ValueError for an empty one, for ids outside the ``vocabulary``, and for sampling parameters out of range:
    all that would fail in a step fails its own request here.
    """
    if problem := unusable(request.sampling):
        raise ValueError(problem)
    size = request.prompt.size - request.made
    if size > most or request.prompt.size >= context:
        raise PromptTooLong(
            f"the prompt has {size} tokens, at most {min(most, context - 1)} are taken (rollout.max_prompt_tokens "
            f"{most}, context of the model {context}); shorten it or raise the setting"
        )
    if size <= 0:
        raise ValueError("the prompt has no token")
    least, largest = int(request.prompt.min()), int(request.prompt.max())
    if least < 0 or largest >= vocabulary:
        raise ValueError(
            f"token id {least if least < 0 else largest} of the prompt is none of the model's {vocabulary}"
        )


def unusable(sampling: Sampling) -> str:
    """What is wrong with sampling parameters by themselves; nothing where they can be sampled with.

    >>> unusable(Sampling(temperature=-1.0))
    'temperature is -1.0: it is 0 or more'
    """
    if not 0 <= sampling.temperature < math.inf:
        return f"temperature is {sampling.temperature}: it is 0 or more"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}: it is above 0 and at most 1"
    if not 0 <= sampling.top_k < 1 << 31:
        return f"top_k is {sampling.top_k}: it is from 0 (all) to {(1 << 31) - 1}"
    return ""


def refuse_extra(request: Request, engine: str) -> None:
    """Raise ValueError for parameters beyond temperature, top-p and top-k, which ``engine`` cannot apply."""
    if request.sampling.extra:
        raise ValueError(f"engine {engine} cannot apply {', '.join(changes(request.sampling))}; leave it out")


def changes(sampling: Sampling) -> list[str]:
    """The parameters by which the sampled distribution is not the policy's own at some temperature; none: neutral."""
    out = [] if sampling.temperature > 0 else ["temperature"]
    if sampling.top_p < 1:
        out.append("top_p")
    if sampling.top_k > 0:
        out.append("top_k")
    return [*out, *(json.loads(sampling.extra) if sampling.extra else ())]


def neutral(sampling: Sampling) -> bool:
    """Whether the sampled distribution is the policy's own at some temperature, so that its tokens may be trained."""
    return not changes(sampling)


def generate(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """Run requests to their ends and return them in the order given."""
    for request in requests:
        engine.add(request)
    done: dict[int, Generation] = {}
    while len(done) < len(requests):
        done.update((generation.key, generation) for generation in engine.step())
    return [done[request.key] for request in requests]
