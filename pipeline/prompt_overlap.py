"""Held-out prompts that were trained on too: what an evaluation cannot tell from memory.

In: the Prompts of a run, held-out ones first; out: which of them say the same as a training prompt, whatever their ids,
and what the newest evaluated version earned on those and on the others.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.pipeline.evaluation import EVALUATION_STREAM
from headrace.schemas.records import EvalResult, Prompt

__all__ = ("OverlapFigures", "PromptOverlap")

_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFigures:
    """What is shared, for the report.

    held_out: prompts of the evaluation. shared: those whose text is a training prompt's too. named: ids of the first of
    them. accuracy_shared, accuracy_others: mean reward of the newest evaluated version on each; None without samples.
    """

    held_out: int
    shared: int
    named: list[str]
    accuracy_shared: float | None
    accuracy_others: float | None

    def summary(self) -> str:
        """One line for people; empty when nothing is shared."""
        if not self.shared:
            return ""
        named = f"{', '.join(self.named)}{' ...' if self.shared > len(self.named) else ''}"
        told = f"{self.shared} of {self.held_out} held-out prompts are training prompts too ({named})"
        if self.accuracy_shared is None or self.accuracy_others is None:
            return told
        return f"{told}: accuracy {self.accuracy_shared:.3f} on them, {self.accuracy_others:.3f} on the others"


class PromptOverlap:
    """Folds the topic ``prompts``; only held-out prompts are remembered."""

    def __init__(self) -> None:
        self._held_out: dict[bytes, list[str]] = {}
        self._shared: dict[bytes, list[str]] = {}

    def fold(self, prompt: Prompt) -> None:
        """Take one prompt."""
        key = _said(prompt)
        if prompt.stream == EVALUATION_STREAM:
            self._held_out.setdefault(key, []).append(prompt.prompt_id)
        elif key in self._held_out:
            self._shared[key] = self._held_out[key]

    def figures(self, newest: Sequence[EvalResult]) -> OverlapFigures | None:
        """For the report; ``newest``: the results of the newest evaluated version. None without held-out prompts."""
        if not self._held_out:
            return None
        shared = {name for names in self._shared.values() for name in names}
        return OverlapFigures(
            held_out=sum(map(len, self._held_out.values())),
            shared=sum(map(len, self._shared.values())),
            named=sorted(shared)[:_NAMED],
            accuracy_shared=_mean([r.reward for r in newest if r.prompt_id in shared]),
            accuracy_others=_mean([r.reward for r in newest if r.prompt_id not in shared]),
        )


def _said(prompt: Prompt) -> bytes:
    """A digest of what a prompt says: neither case nor white space makes another prompt, an id or an answer neither."""
    turns = [(m.role, m.content) for m in prompt.messages] or [("", prompt.prompt)]
    text = "\0".join(f"{role}\1{' '.join(content.split()).casefold()}" for role, content in turns)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
