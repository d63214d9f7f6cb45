"""One hosted policy: requests of episodes meet the engine, versions are waited for, weights swapped between steps.

Goes in: prompts with the oldest version that may sample them; comes out: awaited generations. A request enters the
engine only when the weights in force are new enough, so no token is ever sampled below its task's min version
(protocol 4). What becomes of unfinished sequences when new weights come is ``rollout.on_new_weights``: ``keep`` lets
the engine go on with them, ``abort_resume`` breaks them off and resumes each from its prefix, ``finish`` makes the new
weights wait until every episode that began under the old ones has ended.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.connectors.engines.engine import Engine, Generation, PromptTooLong, Request
from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.rollout.episode import Episode, joined, saved_sequence
from headrace.pipeline.workflows.workflow import EpisodeFailed
from headrace.schemas import parts
from headrace.schemas.parts import PolicyBound, Sampling
from headrace.schemas.records import Prompt

__all__ = ("OnNewWeights", "Sampler", "Session")

_REMEMBERED = 4096
_CHARACTERS = 16
"""Of a text for each token that a prompt may have, before it is looked whether more of it is worth tokenising."""
_SEAM = 16
"""Tokens by which a beginning of a text may differ from the text where it was cut."""

OnNewWeights = Literal["keep", "abort_resume", "finish"]


@dataclass(eq=False, slots=True)
class _Wanted:
    """A generation that somebody waits for. prefix: what was sampled before the request that is in the engine."""

    key: int
    prompt: npt.NDArray[np.int32]
    sampling: Sampling
    bound: PolicyBound
    episode: Episode
    prefix: Generation | None
    future: "asyncio.Future[Generation]"

    def request(self) -> Request:
        """What the engine has still to do."""
        if self.prefix is None or not self.prefix.tokens.size:
            return Request(self.key, self.prompt, self.sampling)
        ids = np.concatenate([self.prompt, self.prefix.tokens]).astype(np.int32)
        return Request(self.key, ids, self.sampling, self.prefix.tokens.size)


class Sampler:
    """A policy's engine and tokenizer in this worker; all methods are called in the worker's thread."""

    def __init__(
        self,
        policy: int,
        engine: Engine,
        folder: ModelFolder,
        *,
        on_new_weights: OnNewWeights = "keep",
        max_prompt_tokens: int = 1 << 30,
    ) -> None:
        self.policy = policy
        self.engine = engine
        self.tokens = 0
        """Tokens sampled so far."""
        self._mode = on_new_weights
        self._most = max_prompt_tokens
        self.folder = folder
        """Tokenizer and chat template."""
        self._next_key = 0
        self._inside: dict[int, _Wanted] = {}
        self._early: dict[int, _Wanted] = {}
        self._guests: set[Episode] = set()
        """Episodes that have sampled something and go on; kept under ``finish`` only."""
        self._held: tuple[Mapping[str, npt.NDArray[Any]], int] | None = None
        """The newest weights while they wait for the guests to end."""
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
        return min((wanted.bound.min_version for wanted in self._early.values()), default=-1)

    def load(self, weights: Mapping[str, npt.NDArray[Any]], version: int) -> bool:
        """Put a version in force, or under ``finish`` hold it back for a while; requests that waited for it enter.

        True when unfinished sequences were broken off; they go on from their prefixes.
        """
        if self._mode == "finish" and self._guests:
            self._held = weights, version
            return False
        broken_off = self.break_off() if self._mode == "abort_resume" else 0
        self._held = None
        self.engine.load_weights(weights, version)
        for key, wanted in sorted(self._early.items()):
            if self._may_enter(wanted):
                del self._early[key]
                self._enter(wanted)
        return broken_off > 0

    def break_off(self) -> int:
        """Take every request out of the engine, with what it has; they wait as if for a version. Says how many."""
        before = len(self._early)
        for generation in self.engine.abort_all():
            wanted = self._inside.get(generation.key)
            if wanted is None or generation.end_reason != "abort" or generation.error:
                self._ended(generation)
                continue
            self._early[wanted.key] = self._inside.pop(wanted.key)
            wanted.prefix = joined(wanted.prefix, generation)
            self.tokens += generation.tokens.size
        return len(self._early) - before

    def prefixes(self) -> dict[Episode, list[parts.Sequence]]:
        """What was sampled, before it was broken off, for generations that somebody waits for, by episode."""
        out: dict[Episode, list[parts.Sequence]] = {}
        for wanted in (*self._inside.values(), *self._early.values()):
            if wanted.prefix is not None:
                sequence = saved_sequence(wanted.prompt, wanted.sampling, self.policy, wanted.prefix)
                if sequence is not None:
                    out.setdefault(wanted.episode, []).append(sequence)
        return out

    def step(self) -> None:
        """One decode step; wakes the episodes whose generation ended."""
        for generation in self.engine.step():
            self._ended(generation)

    async def generate(
        self,
        prompt: npt.NDArray[np.int32],
        sampling: Sampling,
        bound: PolicyBound,
        episode: Episode | None = None,
        prefix: Generation | None = None,
    ) -> Generation:
        """Sample a completion with weights of at least ``bound.min_version``; cancelling it frees its row.

        episode: what it belongs to, which may have sampled before. prefix: what was sampled of it already; the result
        begins with it.
        """
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        wanted = _Wanted(self._next_key, prompt, sampling, bound, episode or Episode(), prefix, future)
        self._next_key += 1
        if self._may_enter(wanted):
            self._enter(wanted)
        else:
            self._early[wanted.key] = wanted
        try:
            return await future
        finally:
            self._early.pop(wanted.key, None)
            if self._inside.pop(wanted.key, None) is not None:
                self.engine.abort(wanted.key)

    def leave(self, episode: Episode) -> None:
        """An episode has ended; the last of those that held new weights back lets them in."""
        self._guests.discard(episode)
        if self._held is not None and not self._guests:
            self.load(*self._held)

    def refuse(self, version: int, reason: str) -> None:
        """Fail the requests that wait for exactly this version, which cannot be loaded."""
        for key, wanted in list(self._early.items()):
            if wanted.bound.pinned and wanted.bound.min_version == version:
                del self._early[key]
                if not wanted.future.done():
                    wanted.future.set_exception(EpisodeFailed(reason))

    def _may_enter(self, wanted: _Wanted) -> bool:
        held_back = self._held is not None and wanted.episode not in self._guests
        bound = wanted.bound
        fits = self.version == bound.min_version if bound.pinned else self.version >= bound.min_version
        return fits and not held_back

    def _enter(self, wanted: _Wanted) -> None:
        """Give a request to the engine, or its refusal to whoever still waits for it."""
        try:
            self.engine.add(wanted.request())
        except (PromptTooLong, ValueError) as error:
            if not wanted.future.done():
                wanted.future.set_exception(error)
            return
        self._inside[wanted.key] = wanted
        if self._mode == "finish":
            self._guests.add(wanted.episode)

    def _ended(self, generation: Generation) -> None:
        """The engine is done with a request."""
        self.tokens += generation.tokens.size
        wanted = self._inside.pop(generation.key, None)
        if wanted is None or wanted.future.done():
            return
        if generation.error:
            wanted.future.set_exception(EpisodeFailed(generation.error, "abort"))
        else:
            wanted.future.set_result(joined(wanted.prefix, generation))

    def encode(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """Token ids of a prompt; the replicas of a group share them."""
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

    def tokenize(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of text as it is. Raises PromptTooLong, after a time that does not grow with the text beyond."""
        size = _CHARACTERS * self._most
        while len(text) > size:
            if self.folder.tokenize(text[:size]).size > self._most + _SEAM:
                raise PromptTooLong(
                    f"the first {size} of {len(text)} characters are more than {self._most} tokens "
                    "(rollout.max_prompt_tokens); shorten it or raise the setting"
                )
            size *= 2
        return self.folder.tokenize(text)

    def decode(self, tokens: npt.NDArray[np.int32]) -> str:
        """Text of token ids without special tokens."""
        return self.folder.decode(tokens)


@dataclass(frozen=True, slots=True)
class Session:
    """A policy as one task may use it (``workflow.PolicySession``)."""

    policy: int
    sampler: Sampler
    bound: PolicyBound
    episode: Episode = field(default_factory=Episode)

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
        """Token ids of text as it is. Raises PromptTooLong."""
        return self.sampler.tokenize(text)

    def detokenize(self, tokens: npt.NDArray[np.int32]) -> str:
        """Text of token ids, special tokens written out."""
        return self.sampler.folder.detokenize(tokens)

    async def generate(self, prompt: npt.NDArray[np.int32], sampling: Sampling) -> Generation:
        """Sample within the task's version bound; what an earlier attempt sampled for this prompt is taken over."""
        before = self.episode.take(prompt, sampling, self.bound)
        if before is None or before.end_reason == "abort":
            generation = await self.sampler.generate(prompt, sampling, self.bound, self.episode, before)
        else:
            generation = before
        self.episode.note(prompt, sampling, self.policy, generation)
        return generation
