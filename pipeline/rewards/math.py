"""The reward ``math``: 1 when the last answer in a completion equals the prompt's, as mathematics, not as text.

Goes in: a completion with its answer in ``\\boxed{}`` or at its end, and the prompt's answer; comes out: 0 or 1. The
comparison is math-verify's, in a process of its own, because it uses signals and may run long.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from headrace.pipeline.environments.actions import after_thinking
from headrace.pipeline.rewards.reward import Completion, RewardOptions
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Prompt

__all__ = ("Math", "MathOptions")


class MathOptions(RewardOptions):
    """Options of ``math``."""

    timeout_seconds: float = Field(15.0, gt=0)
    need_stop: bool = True
    """A completion that was cut off has not answered."""


class Math:
    """1 for an answer that equals the prompt's as mathematics. Raises ConfigurationError without math-verify."""

    Options: ClassVar[type[RewardOptions]] = MathOptions
    scope: ClassVar[Literal["trajectory", "group"]] = "trajectory"
    isolation: ClassVar[Literal["process", "inline", "thread"]] = "process"

    def __init__(self, options: MathOptions) -> None:
        self._need_stop = options.need_stop
        self._verify, self._parse = _math_verify()

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """Compare. Raises ValueError for an answer of the prompt that cannot be read as mathematics."""
        if self._need_stop and completion.end_reason != "stop":
            return 0.0
        return float(self.equal(prompt.answer, after_thinking(completion.text)))

    def equal(self, answer: str, text: str) -> bool:
        """Whether what a text ends with equals an answer. Raises ValueError for an answer that is no mathematics."""
        # the time of a call is bounded by the process that it runs in
        gold = self._parse(answer, parsing_timeout=None) or self._parse(f"${answer}$", parsing_timeout=None)
        if not gold:
            raise ValueError(f"the answer {answer[:100]!r} of the prompt cannot be read as mathematics")
        return bool(self._verify(gold, self._parse(text, parsing_timeout=None), timeout_seconds=None))


def _math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigurationError(
            f"reward math needs the package math-verify ({error}): pip install 'headrace[math]'"
        ) from error
    return verify, parse
