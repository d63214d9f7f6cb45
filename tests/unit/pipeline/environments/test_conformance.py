"""The shipped environment keeps every promise, and one that breaks a promise is found by its name."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.connectors.conformance import assert_conforms
from headrace.pipeline.environments.conformance import conformance
from headrace.pipeline.environments.environment import Observation
from headrace.schemas.records import Prompt


@pytest.mark.parametrize("settings", [{}, {"turns": 1}, {"turns": 9, "largest": 99}])
def test_arithmetic_conforms(settings: dict[str, Any]) -> None:
    assert_conforms("environments", "arithmetic", settings)


class Fine:
    """Three turns, whatever is done."""

    def __init__(self) -> None:
        self.left, self.seed = 0, 0

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        self.left, self.seed = 3, seed
        return Observation(prompt.prompt)

    def step(self, action: str) -> Observation:
        if self.left <= 0:
            raise ValueError("it is over")
        self.left -= 1
        return self.show(action)

    def show(self, action: str) -> Observation:
        return Observation(f"{self.seed} {action[:3]}", 0.0, done=self.left == 0)

    def close(self) -> None:
        self.left = 0


class Drawing(Fine):
    def show(self, action: str) -> Observation:
        return Observation(str(random.random()), 0.0, done=self.left == 0)


class Endless(Fine):
    def step(self, action: str) -> Observation:
        return Observation("", done=True)


class Worthless(Fine):
    def show(self, action: str) -> Observation:
        return Observation("", float("inf"), done=self.left == 0)


class Remembering(Fine):
    """Counts the steps of all its episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def show(self, action: str) -> Observation:
        self.steps += 1
        return Observation(str(self.steps > 16), 0.0, done=self.left == 0)


class OnceClosed(Fine):
    def close(self) -> None:
        if self.left < 0:
            raise RuntimeError("closed already")
        self.left = -1


class Fragile(Fine):
    def show(self, action: str) -> Observation:
        return Observation("", float(int(action or "0")), done=self.left == 0)


@pytest.mark.parametrize(
    ("cls", "broken", "says"),
    [
        (Fine, set(), ""),
        (Drawing, {"seed"}, "gives another episode the second time"),
        (Endless, {"after_the_end"}, "must raise ValueError"),
        (Worthless, {"observations"}, "the reward is inf"),
        (Remembering, {"seed"}, "another episode"),
        (OnceClosed, {"close"}, "raised RuntimeError: closed already"),
        (Fragile, {"observations"}, "raised ValueError"),
    ],
)
def test_a_broken_promise_is_found(cls: type[Fine], broken: set[str], says: str) -> None:
    checks = conformance(f"{__name__}:{cls.__name__}", {})
    found = {check.name: check.detail for check in checks if not check.passed}
    assert broken <= set(found) and bool(found) == bool(broken), found
    assert not broken or any(says in detail for detail in found.values()), found
