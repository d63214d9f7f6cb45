"""Reward 1 when the completion is the answer and was ended by the model itself, else 0.

Goes in: the answer of the prompt and the completion's text without special tokens; comes out: 0 or 1. A completion that
ran into its token limit has not answered, whatever it begins with.
"""

from typing import ClassVar, Literal

from headrace.pipeline.rewards.reward import Completion, RewardOptions
from headrace.schemas.records import Prompt

__all__ = ("ExactMatch", "ExactMatchOptions")


class ExactMatchOptions(RewardOptions):
    """Options of ``exact_match``."""

    strip: bool = False
    """Leave white space at both ends out of the comparison."""


class ExactMatch:
    """The reward ``exact_match``."""

    Options: ClassVar[type[RewardOptions]] = ExactMatchOptions
    scope: ClassVar[Literal["trajectory", "group"]] = "trajectory"
    isolation: ClassVar[Literal["process", "inline"]] = "inline"

    def __init__(self, options: ExactMatchOptions) -> None:
        self._strip = options.strip

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """1.0 for the exact answer ended by a stop token, 0.0 otherwise."""
        text, answer = completion.text, prompt.answer
        if self._strip:
            text, answer = text.strip(), answer.strip()
        return float(completion.end_reason == "stop" and text == answer)
