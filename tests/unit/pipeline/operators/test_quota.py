"""Shares that are exact in the long run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.operators.quota import Quota

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


def quota(weights: list[float]) -> Quota:
    return Quota({str(n): weight for n, weight in enumerate(weights)})


@given(weights=WEIGHTS, count=st.integers(1, 300))
def test_whose_turn_it_is_keeps_every_class_near_its_target(weights: list[float], count: int) -> None:
    made = quota(weights)
    for _ in range(count):
        made.add(made.most_owed(made.counts))
    for name, got in made.counts.items():
        assert abs(got - made.share(name) * count) < max(1, len(weights) / 2)


@given(weights=WEIGHTS, seed=st.integers(0, 1000))
def test_dropping_what_is_ahead_keeps_every_class_near_its_target(weights: list[float], seed: int) -> None:
    made, r = quota(weights), random.Random(seed)
    for _ in range(500):
        name = str(min(int(r.expovariate(1.0)), len(weights) - 1))
        if made.surplus(name) < 1 - 1e-9:
            made.add(name)
        total = sum(made.counts.values())
        assert all(abs(got - made.share(n) * total) <= len(weights) + 1 for n, got in made.counts.items())
        assert any(made.surplus(n) < 1 - 1e-9 for n in made.counts), "somebody may always follow"


def test_the_first_hundred_of_three_to_one() -> None:
    made = Quota({"a": 3, "b": 1})
    order = []
    for _ in range(100):
        turn = made.most_owed(["b", "a"])
        made.add(turn)
        order.append(turn)
    assert order[:8] == ["a", "a", "b", "a", "a", "a", "b", "a"]
    assert made.counts == {"a": 75, "b": 25}


def test_classes_without_a_weight_have_no_part() -> None:
    made = Quota({"a": 1, "b": 0})
    made.add("b")
    made.add("c")
    assert made.counts == {"a": 0} and made.share("b") == made.share("c") == 0
    with pytest.raises(ValueError):
        made.most_owed(["c"])
