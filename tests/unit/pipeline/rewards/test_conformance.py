"""Every shipped reward keeps every promise, and one that breaks a promise is found by its name."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.pipeline.rewards.conformance import conformance
from headrace.pipeline.rewards.reward import Completion, RewardFailed, RewardOptions
from headrace.schemas.records import Prompt

COUNTER = itertools.count()


@pytest.mark.parametrize("settings", [{}, {"answer": "Tokyo"}, {"timeout_seconds": 3}])
def test_exact_match_conforms(settings: dict[str, Any]) -> None:
    """Rewards of other programs (code, judges) have tests of their own."""
    assert [check for check in conformance("exact_match", settings) if not check.passed] == []


def picky(prompt: Prompt, completion: Completion) -> float:
    return float(len(completion.text) > int(prompt.answer))


def test_rows_of_a_form_of_their_own_are_given_by_the_answer() -> None:
    checks = {check.name: check.passed for check in conformance(f"{__name__}:picky", {})}
    assert not checks["finite"]
    assert all(check.passed for check in conformance(f"{__name__}:picky", {"answer": 3}))


def fine(prompt: Prompt, completion: Completion) -> dict[str, float]:
    return {"right": float(completion.text == prompt.answer), "length": -len(completion.text) / 1e6}


def raising(prompt: Prompt, completion: Completion) -> float:
    return float(completion.text)


def counting(prompt: Prompt, completion: Completion) -> float:
    return float(next(COUNTER))


def writing(prompt: Prompt, completion: Completion) -> float:
    completion.tokens[:] = next(COUNTER) % 7
    return 0.0


class Slow:
    Options = RewardOptions
    options = RewardOptions(timeout_seconds=0.01)

    def __init__(self, options: RewardOptions) -> None: ...

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        time.sleep(0.002)
        return 0.0


class Ranking:
    """Compares the members of a group; the longest cannot be judged."""

    scope = "group"
    Options = RewardOptions

    def __init__(self, options: RewardOptions) -> None: ...

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Any]:
        return [float(len(c.text)) if len(c.text) < 99 else 99.0 for c in completions]


class Refusing(Ranking):
    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Any]:
        return [RewardFailed("cannot be judged"), *super().__call__(prompt, completions)[1:]]


class Losing(Ranking):
    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Any]:
        return super().__call__(prompt, completions)[1:]


class Whole(Ranking):
    scope = "batch"


@pytest.mark.parametrize(
    ("name", "broken", "says"),
    [
        ("fine", set(), ""),
        ("raising", {"finite"}, "raised ValueError"),
        ("counting", {"determinism"}, "asked again it gives"),
        ("writing", {"inputs"}, "it changes what it is given"),
        ("Slow", {"time"}, "one call has 0.01 s"),
        ("Ranking", set(), ""),
        ("Refusing", {"finite"}, "cannot be judged"),
        ("Losing", {"finite"}, "9 rewards for 10 completions"),
        ("Whole", {"declared"}, "scope is 'batch'"),
    ],
)
def test_a_broken_promise_is_found(name: str, broken: set[str], says: str) -> None:
    checks = conformance(f"{__name__}:{name}", {})
    found = {check.name: check.detail for check in checks if not check.passed}
    assert broken <= set(found) and bool(found) == bool(broken), found
    assert not broken or any(says in detail for detail in found.values()), found
