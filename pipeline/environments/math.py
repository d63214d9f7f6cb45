"""The environment ``math``: a problem and a number of attempts, each answered with right or wrong.

Goes in: the prompt's problem and answer, attempts; comes out: 1 for the right answer, less for each attempt before it.
Answers are compared as the reward ``math`` compares them.
"""

from pydantic import Field

from headrace.pipeline.environments.actions import after_thinking
from headrace.pipeline.environments.environment import EnvironmentOptions, Observation
from headrace.pipeline.rewards.math import Math, MathOptions
from headrace.schemas.records import Prompt

__all__ = ("MathProblem", "MathProblemOptions")


class MathProblemOptions(EnvironmentOptions):
    """Options of ``math``."""

    attempts: int = Field(3, ge=1)
    """Answers of an episode."""
    discount: float = Field(0.5, ge=0, le=1)
    """What each attempt before the right one multiplies the reward by."""


class MathProblem:
    """A problem and a number of attempts. Raises ConfigurationError when math-verify is not installed."""

    Options = MathProblemOptions

    def __init__(self, options: MathProblemOptions | None = None) -> None:
        self._options = options or MathProblemOptions()
        self._math = Math(MathOptions())
        self._prompt: Prompt | None = None
        self._made = 0

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        """The problem."""
        self._prompt, self._made = prompt, 0
        return Observation(prompt.prompt)

    def step(self, action: str) -> Observation:
        """Judge an attempt. Raises ValueError after the end."""
        if self._prompt is None:
            raise ValueError("the episode has ended: call reset first")
        right = self._math.equal(self._prompt.answer, after_thinking(action))
        value = self._options.discount**self._made if right else 0.0
        self._made += 1
        if right or self._made == self._options.attempts:
            self._prompt = None
            return Observation("", value, done=True, details={"verdict": "right" if right else "wrong"})
        left = self._options.attempts - self._made
        return Observation(f"That is wrong. Attempts left: {left}.", details={"verdict": "wrong"})

    def close(self) -> None:
        """End the episode."""
        self._prompt = None
