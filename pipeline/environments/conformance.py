"""What every environment must keep, tried by playing it: episodes that follow from their seed, and end cleanly.

In: a name or ``module:attribute`` with its options. Out: one ``Check`` for every promise of
``environment.Environment``. Actions are words, numbers, nothing, letters of all alphabets, and one of 100,000 letters.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from random import Random
from typing import Any

from headrace.connectors.conformance import Check, attempt
from headrace.pipeline.environments.environment import Environment, Observation, make_environment
from headrace.schemas.records import Prompt

__all__ = ("conformance",)

ACTIONS = ("0", "1", "-3", "", "yes", "stop", "東京 🦉", "\x00", '{"name": "tool", "arguments": {}}', "x" * 100_000)
SEEDS = (0, 1, 7, 2**31 - 1)
_TURNS = 64
"""Turns after which an episode that goes on is closed."""
PROMPT = Prompt(
    prompt_id="00000000000000e0", stream="main", dataset="conformance", row=0, epoch=0, position=0, prompt="Begin.",
    answer="1",
)  # fmt: skip


def conformance(name: str, settings: Mapping[str, Any]) -> list[Check]:
    """Try an environment. Raises ConfigurationError for an unknown name and options that it refuses."""
    environment = make_environment(name, settings)
    return [
        attempt("observations", lambda: _observations(environment)),
        attempt("seed", lambda: _seeded(environment, make_environment(name, settings))),
        attempt("after_the_end", lambda: _after_the_end(environment)),
        attempt("restart", lambda: _restarted(environment)),
        attempt("close", lambda: _closed(environment)),
    ]


def _actions(seed: int) -> Sequence[str]:
    return Random(seed).choices(ACTIONS, k=_TURNS)


def _play(environment: Environment, seed: int) -> list[Observation]:
    seen = [environment.reset(seed, PROMPT)]
    for action in _actions(seed):
        if seen[-1].done:
            break
        seen.append(environment.step(action))
    return seen


def _observations(environment: Environment) -> str:
    turns, ended = 0, 0
    for seed in SEEDS:
        for number, seen in enumerate(_play(environment, seed)):
            where = f"seed {seed}, turn {number}"
            assert isinstance(seen, Observation), f"{where}: it gives a {type(seen).__name__}, no Observation"
            assert isinstance(seen.text, str), f"{where}: the text is a {type(seen.text).__name__}"
            assert isfinite(seen.reward), f"{where}: the reward is {seen.reward}"
            assert all(isinstance(x, str) for pair in seen.details.items() for x in pair), f"{where}: details are texts"
            turns, ended = turns + 1, ended + bool(seen.done)
    return f"{turns} observations with finite rewards; {ended} of {len(SEEDS)} episodes ended within {_TURNS} turns"


def _seeded(environment: Environment, other: Environment) -> str:
    try:
        for seed in SEEDS:
            first = _play(environment, seed)
            assert _play(environment, seed) == first, f"seed {seed} gives another episode the second time"
            assert _play(other, seed) == first, f"seed {seed} gives another episode in another instance"
    finally:
        other.close()
    return "equal seeds and actions give equal episodes, also in another instance"


def _after_the_end(environment: Environment) -> str:
    for seed in SEEDS:
        if not _play(environment, seed)[-1].done:
            continue
        try:
            environment.step("1")
        except ValueError:
            return "a step after the end raises ValueError"
        raise AssertionError("a step after the end is taken; it must raise ValueError")
    return "no episode ended, so there was no step after the end"


def _restarted(environment: Environment) -> str:
    """An episode that is left in its middle leaves no trace in the next."""
    alone = _play(environment, SEEDS[0])
    opening = environment.reset(SEEDS[1], PROMPT)
    if not opening.done:
        environment.step(ACTIONS[0])
    assert _play(environment, SEEDS[0]) == alone, "an episode left in its middle changes the next one"
    return "an episode that was left in its middle leaves nothing behind"


def _closed(environment: Environment) -> str:
    environment.close()
    environment.reset(SEEDS[0], PROMPT)
    environment.close()
    environment.close()
    return "it closes before, within and twice after an episode"
