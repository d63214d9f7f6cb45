"""The reward ``diversity``: how unlike the others of its group a completion is, by the words in a row that they share.

Goes in: the completions of a prompt; comes out: for each 1 minus the mean share of its word n-grams that another
completion has too (Jaccard), times ``weight``. Equal completions get 0, those without a common n-gram ``weight``.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from headrace.pipeline.rewards.reward import Completion, RewardOptions
from headrace.schemas.records import Prompt

__all__ = ("Diversity", "DiversityOptions")


class DiversityOptions(RewardOptions):
    """Options of ``diversity``."""

    words: int = Field(2, ge=1)
    """Length of an n-gram."""
    weight: float = 1.0
    """What a completion like no other gets."""


class Diversity:
    """See the module."""

    Options: ClassVar[type[RewardOptions]] = DiversityOptions
    scope: ClassVar[Literal["trajectory", "group"]] = "group"
    isolation: ClassVar[Literal["process", "inline", "thread"]] = "thread"

    def __init__(self, options: DiversityOptions) -> None:
        self._options = options

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """A value for each; 0 for the only one of its group."""
        grams = [self._grams(completion.text) for completion in completions]
        out = []
        for i, own in enumerate(grams):
            likeness = [_jaccard(own, other) for j, other in enumerate(grams) if j != i]
            out.append(self._options.weight * (1 - sum(likeness) / len(likeness)) if likeness else 0.0)
        return out

    def _grams(self, text: str) -> set[tuple[str, ...]]:
        words = text.split()
        size = min(self._options.words, max(1, len(words)))
        return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def _jaccard(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    return len(one & other) / len(one | other) if one or other else 1.0
