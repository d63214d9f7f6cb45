"""One hosted policy: requests of episodes meet the engine, versions are waited for, weights swapped between steps.

Goes in: prompts with the oldest version that may sample them; comes out: awaited generations. A request enters the
engine only when the weights in force are new enough, so no token is ever sampled below its task's min version
(protocol 4).
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.connectors.engines.engine import Engine, Generation, PromptTooLong, Request
from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.workflows.workflow import EpisodeFailed
from headrace.schemas.parts import PolicyBound, Sampling
from headrace.schemas.records import Prompt

__all__ = ("Sampler", "Session")

_REMEMBERED = 4096


class Sampler:
    """A policy's engine and tokenizer in this worker; all methods are called in the worker's thread."""

    def __init__(self, policy: int, engine: Engine, folder: ModelFolder) -> None:
        self.policy = policy
        self.engine = engine
        self.tokens = 0
        """Tokens sampled so far."""
        self.folder = folder
        """Tokenizer and chat template."""
        self._next_key = 0
        self._futures: dict[int, asyncio.Future[Generation]] = {}
        self._early: dict[int, tuple[PolicyBound, Request]] = {}
        self._encoded: dict[str, npt.NDArray[np.int32]] = {}

    @property
    def version(self) -> int:
        """Version of the weights in force."""
        return self.engine.version

    @property
    def busy(self) -> bool:
        """Whether a step would sample anything."""
        return self.engine.active > 0

    @property
    def waiting_for(self) -> int:
        """The lowest version that some request waits for; -1 when none waits."""
        return min((bound.min_version for bound, _ in self._early.values()), default=-1)

    def load(self, weights: Mapping[str, npt.NDArray[Any]], version: int) -> None:
        """Put a version in force; requests that waited for it enter."""
        self.engine.load_weights(weights, version)
        for key, (bound, request) in list(self._early.items()):
            if bound.min_version <= version:
                del self._early[key]
                self._enter(request, bound)

    def step(self) -> None:
        """One decode step; wakes the episodes whose generation ended."""
        for generation in self.engine.step():
            self.tokens += generation.tokens.size
            future = self._futures.pop(generation.key, None)
            if future is not None and not future.done():
                future.set_result(generation)

    async def generate(self, prompt: npt.NDArray[np.int32], sampling: Sampling, bound: PolicyBound) -> Generation:
        """Sample a completion with weights of at least ``bound.min_version``; cancelling it frees its row."""
        request = Request(self._next_key, prompt, sampling)
        self._next_key += 1
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._futures[request.key] = future
        if self.version >= bound.min_version:
            self._enter(request, bound)
        else:
            self._early[request.key] = (bound, request)
        try:
            return await future
        finally:
            if self._futures.pop(request.key, None) is not None and self._early.pop(request.key, None) is None:
                with contextlib.suppress(KeyError):
                    self.engine.abort(request.key)

    def _enter(self, request: Request, bound: PolicyBound) -> None:
        """Give a request to the engine, or its refusal to whoever still waits for it."""
        try:
            if bound.pinned and self.version > bound.min_version:
                raise EpisodeFailed(
                    f"version {bound.min_version} of policy {self.policy} is asked for, {self.version} is loaded"
                )
            self.engine.add(request)
        except (PromptTooLong, EpisodeFailed, ValueError) as error:
            future = self._futures.pop(request.key)
            if not future.done():
                future.set_exception(error)

    def encode(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """Token ids of a prompt; the replicas of a group share them, unless it has no id."""
        if not prompt.prompt_id:
            return self.folder.encode(prompt)
        key = f"{prompt.stream}\0{prompt.prompt_id}"
        found = self._encoded.get(key)
        if found is None:
            found = self.folder.encode(prompt)
            if len(self._encoded) >= _REMEMBERED:
                self._encoded.clear()
            self._encoded[key] = found
        return found

    def decode(self, tokens: npt.NDArray[np.int32]) -> str:
        """Text of token ids without special tokens."""
        return self.folder.decode(tokens)


@dataclass(frozen=True, slots=True)
class Session:
    """A policy as one task may use it (``workflow.PolicySession``)."""

    policy: int
    sampler: Sampler
    bound: PolicyBound

    def encode(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """Token ids of a prompt."""
        return self.sampler.encode(prompt)

    def decode(self, tokens: npt.NDArray[np.int32]) -> str:
        """Text of token ids."""
        return self.sampler.decode(tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of messages."""
        return self.sampler.folder.render(messages, tools, settings)

    def tokenize(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of text as it is."""
        return self.sampler.folder.tokenize(text)

    def detokenize(self, tokens: npt.NDArray[np.int32]) -> str:
        """Text of token ids, special tokens written out."""
        return self.sampler.folder.detokenize(tokens)

    async def generate(self, prompt: npt.NDArray[np.int32], sampling: Sampling) -> Generation:
        """Sample within the task's version bound."""
        return await self.sampler.generate(prompt, sampling, self.bound)
