"""What every reward must keep, tried on completions of all sorts: finite numbers, the same each time, in time.

In: a name or ``module:attribute`` with its options, and ``answer`` for a reward whose rows have answers of a form of
their own. Out: one ``Check`` for every promise of ``reward.Reward``. One with ``scope = "group"`` is given all
completions of a prompt at once.
"""

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.connectors.conformance import Check, attempt
from headrace.pipeline.rewards.reward import Completion, RewardFailed, RewardOptions, call_reward, load_reward
from headrace.schemas.codec import encode
from headrace.schemas.records import Prompt

__all__ = ("COMPLETIONS", "PROMPTS", "conformance")


def _prompt(number: int, text: str, answer: str) -> Prompt:
    return Prompt(
        prompt_id=f"{number:016x}", stream="main", dataset="conformance", row=number, epoch=0, position=number,
        prompt=text, answer=answer,
    )  # fmt: skip


PROMPTS = (_prompt(0, "1+1=", "2"), _prompt(1, "Wie heißt 東京?", "Tokyo"), _prompt(2, "?", ""))
TEXTS = ("2", " 2\n", "Tokyo", "", "no", "\x00\udcff", "東京 🦉", "\\boxed{2}", "<final>A</final>", "2" * 20_000)
"""Right and wrong answers, none at all, letters of all alphabets, a lone surrogate, and more than anyone would read."""
COMPLETIONS = tuple(
    Completion(text, end, np.arange(min(len(text), 64), dtype="int32"))
    for text, end in zip(TEXTS, ("stop", "length") * len(TEXTS), strict=False)
)


def conformance(name: str, settings: Mapping[str, Any]) -> list[Check]:
    """Try a reward. Raises ConfigurationError for an unknown name and options that it refuses."""
    options = {key: value for key, value in settings.items() if key != "answer"}
    prompts = [replace(p, answer=str(settings["answer"])) for p in PROMPTS] if "answer" in settings else list(PROMPTS)
    reward = load_reward(name, options)
    scope = getattr(reward, "scope", "trajectory")
    score = _together(name, reward) if scope == "group" else _one_by_one(name, reward)
    limit = getattr(getattr(reward, "options", None), "timeout_seconds", RewardOptions().timeout_seconds)
    return [
        attempt("declared", lambda: _declared(reward, scope)),
        attempt("finite", lambda: _finite(score, prompts)),
        attempt("determinism", lambda: _same(score, _scorer(name, options, scope), prompts)),
        attempt("inputs", lambda: _untouched(score, prompts)),
        attempt("time", lambda: _in_time(score, prompts, float(limit))),
    ]


Score = Callable[[Prompt, Sequence[Completion]], list[Mapping[str, float] | str]]


def _one_by_one(name: str, reward: Callable[..., Any]) -> Score:
    def score(prompt: Prompt, completions: Sequence[Completion]) -> list[Mapping[str, float] | str]:
        return [_told(lambda c=c: call_reward(name, reward, prompt, c)) for c in completions]  # type: ignore[misc]

    return score


def _together(name: str, reward: Callable[..., Any]) -> Score:
    def score(prompt: Prompt, completions: Sequence[Completion]) -> list[Mapping[str, float] | str]:
        values = reward(prompt, completions)
        assert len(values) == len(completions), f"it gave {len(values)} rewards for {len(completions)} completions"
        return [
            str(value) if isinstance(value, RewardFailed)
            else _told(lambda v=value: call_reward(name, lambda *_: v, prompt, completions[0]))  # type: ignore[misc]
            for value in values
        ]  # fmt: skip

    return score


def _told(call: Callable[[], Mapping[str, float]]) -> Mapping[str, float] | str:
    try:
        return dict(call())
    except RewardFailed as error:
        return str(error)


def _scorer(name: str, settings: Mapping[str, Any], scope: str) -> Score:
    fresh = load_reward(name, settings)
    return _together(name, fresh) if scope == "group" else _one_by_one(name, fresh)


def _declared(reward: Any, scope: str) -> str:
    isolation = getattr(reward, "isolation", "process")
    assert scope in ("trajectory", "group"), f"scope is {scope!r}: trajectory or group"
    assert isolation in ("process", "inline", "thread"), f"isolation is {isolation!r}: process, inline or thread"
    return f"scope {scope}, isolation {isolation}"


def _finite(score: Score, prompts: Sequence[Prompt]) -> str:
    parts: set[str] = set()
    for prompt in prompts:
        for completion, value in zip(COMPLETIONS, score(prompt, COMPLETIONS), strict=True):
            assert not isinstance(value, str), f"{prompt.prompt!r} answered {completion.text[:30]!r}: {value}"
            parts |= set(value)
    return f"finite for {len(prompts) * len(COMPLETIONS)} completions; parts: {', '.join(sorted(parts))}"


def _same(score: Score, fresh: Score, prompts: Sequence[Prompt]) -> str:
    for prompt in prompts:
        one = score(prompt, COMPLETIONS)
        for other, what in ((score(prompt, COMPLETIONS), "asked again"), (fresh(prompt, COMPLETIONS), "made anew")):
            apart = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
            if apart is not None:
                asked = COMPLETIONS[apart].text[:30]
                raise AssertionError(f"{what} it gives {other[apart]} for {asked!r}, not {one[apart]}")
    return "the same reward when it is asked again, and by another instance"


def _untouched(score: Score, prompts: Sequence[Prompt]) -> str:
    for prompt in prompts:
        before = encode(prompt), pickle.dumps([c.tokens for c in COMPLETIONS])
        score(prompt, COMPLETIONS)
        assert before == (encode(prompt), pickle.dumps([c.tokens for c in COMPLETIONS])), "it changes what it is given"
    return "prompt and tokens are as they were"


def _in_time(score: Score, prompts: Sequence[Prompt], limit: float) -> str:
    slowest = 0.0
    for prompt in prompts:
        began = time.monotonic()
        score(prompt, COMPLETIONS)
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < limit, f"{len(COMPLETIONS)} completions took {slowest:.1f} s; one call has {limit:g} s"
    return f"{len(COMPLETIONS)} completions in {slowest * 1000:.0f} ms; one call has {limit:g} s"
