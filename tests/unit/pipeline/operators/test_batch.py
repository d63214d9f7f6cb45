"""``batch``: whole groups over lanes, balanced by what is asked for."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from serving_feed import make_candidate

from headrace.pipeline.operators.batch import Batch, BatchConfiguration


def place(sizes: list[int], lanes: int, balance: str = "tokens") -> list[int]:
    groups = [make_candidate(n, tokens=size, trained=1 + n % 3) for n, size in enumerate(sizes)]
    return list(Batch(BatchConfiguration.model_validate({"balance": balance})).place(groups, lanes))


def test_the_largest_goes_first_to_the_lightest_lane() -> None:
    assert place([1, 9, 5, 4], 2) == [0, 0, 1, 1]
    assert place([5, 5, 5], 2) == [0, 1, 0]


def test_lanes_are_balanced_by_what_is_asked_for() -> None:
    assert place([9, 1, 1, 1], 2, "groups") == [0, 1, 0, 1]
    assert place([9, 1, 1, 1], 2, "members") == [1, 1, 0, 0], "members 1, 2, 3, 1: 3 and 1, 2 and 1"
    with pytest.raises(ValidationError):
        BatchConfiguration.model_validate({"balance": "bytes"})


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), lanes=st.integers(1, 3))
def test_the_heaviest_lane_is_within_grahams_bound_of_the_best(sizes: list[int], lanes: int) -> None:
    placed = place(sizes, lanes)
    loads = [sum(s for s, lane in zip(sizes, placed, strict=True) if lane == n) for n in range(lanes)]
    best = min(
        max(sum(s for s, lane in zip(sizes, way, strict=True) if lane == n) for n in range(lanes))
        for way in product(range(lanes), repeat=len(sizes))
    )
    assert max(loads) <= (4 / 3 - 1 / (3 * lanes)) * best + 1e-9
    assert place(sizes, lanes) == placed, "the same groups, the same lanes"
