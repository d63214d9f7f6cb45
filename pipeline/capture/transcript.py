"""Sequences of an episode with many calls: a call goes on in a sequence that it extends, or begins another.

Goes in: contexts as text or ids; comes out: replies, and at the end Sequences whose trained tokens were all sampled in
exactly the context in which they stand. History is never tokenised again: a context that begins with the text of an
earlier call is made of that call's ids, and what stands between two calls (template, tools, observations) has mask 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from headrace.connectors.engines.engine import Generation, neutral
from headrace.pipeline.workflows.workflow import EpisodeFailed, PolicySession, check_generation, with_seed
from headrace.schemas import parts
from headrace.schemas.parts import Sampling

__all__ = ("Context", "Reply", "Transcript")

Ids = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Growing:
    """A sequence under construction: its pieces in order, sampled ones with their generation."""

    sampling: Sampling
    prompt: Ids
    pieces: list[Ids | Generation] = field(default_factory=list)
    busy: bool = False
    """A call that extends it is being sampled."""

    def size(self) -> int:
        return self.prompt.size + sum(p.tokens.size if isinstance(p, Generation) else p.size for p in self.pieces)


@dataclass(frozen=True, slots=True)
class _Call:
    """One ended call: the text of its context and reply, the ids of both, and where they stand."""

    text: str
    ids: Ids
    sequence: _Growing


@dataclass(frozen=True, slots=True)
class Context:
    """The ids that a call is sampled after. ``extends``: the sequence that they go on, ``new``: what they add to it."""

    text: str
    ids: Ids
    new: Ids
    extends: _Growing | None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a call sampled: ``text`` without special tokens, ``content`` with all but the one that ended it.

    raw: with that one too. ids: those kept, up to a stop text.
    """

    text: str
    content: str
    raw: str
    ids: Ids
    logprobs: npt.NDArray[np.float32]
    end_reason: str
    prompt_tokens: int


class Transcript:
    """The calls of one policy in one role of an episode; calls may overlap in time.

    base: the task's sampling; the seed of call n follows from its seed and n.
    """

    def __init__(self, session: PolicySession, base: Sampling, role: str = "policy") -> None:
        self._session = session
        self._base = base
        self._role = role
        self._calls: list[_Call] = []
        self._sequences: list[_Growing] = []
        self._started = 0

    def context(self, text: str) -> Context:
        """The context of a text; the part that an earlier call knows keeps its ids."""
        known = max((c for c in self._calls if text.startswith(c.text)), key=lambda c: len(c.text), default=None)
        if known is None:
            ids = self._session.tokenize(text)
            return Context(text, ids, ids, None)
        return self._after(known, text, self._session.tokenize(text[len(known.text) :]))

    def context_of_ids(self, ids: Ids) -> Context:
        """The context of token ids as they are."""
        ids = np.asarray(ids, np.int32)
        known = max(
            (c for c in self._calls if c.ids.size <= ids.size and np.array_equal(ids[: c.ids.size], c.ids)),
            key=lambda c: c.ids.size,
            default=None,
        )
        text = self._session.detokenize(ids)
        return self._after(known, text, ids[known.ids.size :]) if known is not None else Context(text, ids, ids, None)

    async def sample(
        self, context: Context, sampling: Sampling | None = None, stop: Sequence[str] = ()
    ) -> Reply:
        """Sample after a context. ``stop``: texts whose first appearance ends the reply; it is kept.

        Raises EpisodeFailed for a generation that was aborted, is empty or not finite, and PromptTooLong.
        """
        effective = replace(sampling or self._base, seed=self._next_seed())
        into = self._claim(context, effective)
        try:
            made = await self._session.generate(context.ids, effective)
        finally:
            if into is not None:
                into.busy = False
        if made.end_reason == "abort":
            raise EpisodeFailed(made.error or "the engine broke the generation off", "abort")
        check_generation(made)
        cut = self._cut(made, stop)
        return self._keep(context, into, cut, effective, ended_by_token=cut is made and made.end_reason == "stop")

    def sequences(self) -> list[parts.Sequence]:
        """All sequences, in the order in which they began; those without a reply are left out."""
        return [_finished(s, self._session.policy, self._role) for s in self._sequences if s.pieces]

    @property
    def calls(self) -> int:
        """Calls that ended."""
        return len(self._calls)

    def _after(self, known: _Call, text: str, new: Ids) -> Context:
        last = known.sequence.size() == known.ids.size and not known.sequence.busy
        return Context(text, np.concatenate([known.ids, new]), new, known.sequence if last else None)

    def _next_seed(self) -> int:
        number, self._started = self._started, self._started + 1
        return self._base.seed if number == 0 else with_seed(self._base, f"{self._base.seed} {number}").seed

    def _claim(self, context: Context, sampling: Sampling) -> _Growing | None:
        """The sequence that a call goes on, closed to others; none when it was taken since, or sampled otherwise."""
        into = context.extends
        if into is None or into.busy or not _alike(into.sampling, sampling):
            return None
        if into.size() != context.ids.size - context.new.size:
            return None
        into.busy = True
        return into

    def _keep(
        self, context: Context, into: _Growing | None, made: Generation, sampling: Sampling, *, ended_by_token: bool
    ) -> Reply:
        if into is None:
            into = _Growing(sampling, context.ids)
            self._sequences.append(into)
        elif context.new.size:
            into.pieces.append(context.new)
        into.pieces.append(made)
        raw = self._session.detokenize(made.tokens)
        self._calls.append(_Call(context.text + raw, np.concatenate([context.ids, made.tokens]), into))
        text = self._session.decode(made.tokens)
        content = self._session.detokenize(made.tokens[:-1]) if ended_by_token else raw
        return Reply(text, content, raw, made.tokens, made.logprobs, made.end_reason, context.ids.size)

    def _cut(self, made: Generation, stop: Sequence[str]) -> Generation:
        """The shortest beginning of a generation that holds a stop text, as one that ended there."""
        wanted = [s for s in stop if s]
        if not wanted or not any(s in self._session.decode(made.tokens) for s in wanted):
            return made
        low, high = 1, made.tokens.size
        while low < high:
            middle = (low + high) // 2
            text = self._session.decode(made.tokens[:middle])
            if any(s in text for s in wanted):
                high = middle
            else:
                low = middle + 1
        return replace(
            made,
            end_reason="stop",
            tokens=made.tokens[:low],
            logprobs=made.logprobs[:low],
            versions=made.versions[:low],
        )


def _alike(one: Sampling, other: Sampling) -> bool:
    """Whether two calls sampled from the same distribution over the same logits."""
    return replace(one, seed=0, max_new_tokens=1) == replace(other, seed=0, max_new_tokens=1)


def _finished(growing: _Growing, policy: int, role: str) -> parts.Sequence:
    """The Sequence. A reply that filled the context is not trained, and neither is one of an altered distribution."""
    replies = [piece for piece in growing.pieces if isinstance(piece, Generation)]
    trainable = neutral(growing.sampling) and all(reply.known for reply in replies)
    tokens, logprobs, mask, versions = [], [], [], []
    for piece in (growing.prompt, *growing.pieces):
        if isinstance(piece, Generation):
            trained = trainable and piece.end_reason != "context_full"
            tokens.append(piece.tokens)
            mask.append(np.full(piece.tokens.size, trained, np.uint8))
            logprobs.append(piece.logprobs if trained else np.zeros(piece.tokens.size, np.float32))
            versions.append(piece.versions)
        else:
            tokens.append(piece)
            mask.append(np.zeros(piece.size, np.uint8))
            logprobs.append(np.zeros(piece.size, np.float32))
            versions.append(np.full(piece.size, -1, np.int32))
    masks, labels = np.concatenate(mask), np.concatenate(versions)
    of_trained = labels[masks == 1]
    return parts.Sequence(
        policy=policy,
        role=role,
        prompt_length=growing.prompt.size,
        end_reason=replies[-1].end_reason,
        oldest_version=int(of_trained.min()) if of_trained.size else -1,
        newest_version=int(of_trained.max()) if of_trained.size else -1,
        trainable=trainable,
        sampling=growing.sampling,
        tokens=np.concatenate(tokens),
        logprobs=np.concatenate(logprobs),
        mask=masks,
        versions=labels,
    )
