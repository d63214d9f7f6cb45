"""Solved prompts stay out, by the values of the code that the rule comes from."""

from __future__ import annotations

import pytest
from prompt_feed import PromptFeed, make_offer

from headrace.pipeline.operators.filter_solved import FilterSolved, FilterSolvedConfiguration


def feed(**settings: float) -> PromptFeed:
    return PromptFeed(FilterSolved, FilterSolvedConfiguration.model_validate(settings))


def test_29_solved_groups_stop_a_prompt() -> None:
    made = feed()
    rates = []
    for n in range(29):
        assert made.offer("p", n) == ""
        made.learn("p", [1, 1, 1, 1])
        rates.append(made.operator._rates.get(make_offer("p").prompt))
        made.restart()
    assert (rates[27], rates[28]) == (pytest.approx(0.947665, abs=1e-6), pytest.approx(0.952899, abs=1e-6))
    assert made.offer("p", 29) == "solved"
    assert made.offer("q", 30) == "", "every prompt has a rate of its own"


def test_a_rate_is_the_share_of_positive_rewards_and_starts_at_the_prior() -> None:
    made = feed(prior=0.5, decay=0.5)
    made.learn("p", [1, 0.01, 0, -1])
    assert made.operator._rates.get(make_offer("p").prompt) == 0.5
    made.learn("p", [0, 0])
    assert made.operator._rates.get(make_offer("p").prompt) == 0.25


def test_only_complete_groups_teach() -> None:
    made = feed(threshold=0.05)
    made.learn("p", [1, 1], complete=False)
    made.learn("p", [])
    assert made.offer("p") == "" and made.metrics.total("outcomes_ignored") == 2
    made.learn("p", [1, 1])
    assert made.offer("p") == "solved"


def test_memory_is_bounded_and_forgets_what_was_learned_first() -> None:
    made = feed(remember=2, decay=0.0)
    for name in "abca":
        made.learn(name, [1, 1])
    made.restart()
    made.learn("d", [1, 1])
    assert [made.offer(name) for name in "abcd"] == ["solved", "", "", "solved"]
