"""The environment ``arithmetic``: a chain of sums, one a turn, each on the result of the one before.

Goes in: a seed and answers as text; comes out: questions, reward 1 for each right answer. It ends after the last
question or at the first answer that is no number; a wrong number costs its reward only.
"""

import random
import re

from headrace.pipeline.environments.environment import Observation
from headrace.schemas.records import Prompt

__all__ = ("Arithmetic",)

_NUMBER = re.compile(r"\s*(-?\d{1,18})\s*")


class Arithmetic:
    """See the module. turns: questions of an episode. largest: greatest number that is added or taken away."""

    isolation = "inline"

    def __init__(self, turns: int = 3, largest: int = 9) -> None:
        self._turns = turns
        self._largest = largest
        self._random = random.Random()
        self._turn = -1
        self._value = 0

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        """The first question of the episode of this seed; the prompt is not looked at."""
        self._random = random.Random(seed)
        self._turn = 0
        return Observation(self._ask(self._random.randint(0, self._largest)))

    def step(self, action: str) -> Observation:
        """Judge an answer and ask on. Raises ValueError after the end or before ``reset``."""
        if not 0 <= self._turn < self._turns:
            raise ValueError("the episode has ended: call reset first")
        found = _NUMBER.fullmatch(action)
        right = found is not None and int(found[1]) == self._value
        self._turn += 1
        if found is None or self._turn == self._turns:
            self._turn = self._turns
            verdict = "right" if right else "wrong" if found else "no number"
            return Observation("", float(right), done=True, details={"verdict": verdict})
        return Observation(self._ask(self._value), float(right))

    def close(self) -> None:
        """End the episode."""
        self._turn = -1

    def _ask(self, start: int) -> str:
        step = self._random.randint(-self._largest, self._largest)
        self._value = start + step
        return f"{start}{step:+d}="
