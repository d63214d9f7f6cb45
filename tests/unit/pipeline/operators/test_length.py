"""Both bounds are included; what lies outside is masked or ends the group."""

from __future__ import annotations

from typing import Any

import pytest
from operator_feed import OperatorFeed, make_draft, statuses
from pydantic import ValidationError

from headrace.pipeline.operators.length import Length, LengthConfiguration


def applied(lengths: list[int], **options: Any) -> Any:
    operator = Length(LengthConfiguration(**options))
    return OperatorFeed().decide(operator, make_draft([1.0] * len(lengths), length=lengths))


def test_bounds_are_included() -> None:
    assert statuses(applied([1, 2, 5, 6], min_tokens=2, max_tokens=5)) == "bttb"
    assert statuses(applied([1, 2], min_tokens=2)) == "bt"
    assert statuses(applied([5, 6], max_tokens=5)) == "tb"


def test_a_group_that_is_wholly_outside_is_dropped_by_name() -> None:
    assert applied([6, 7], max_tokens=5) == ("too_long", "of 2 members to train: 2 too_long")
    assert applied([1, 3], min_tokens=2, action="drop") == ("too_short", "of 2 members to train: 1 too_short")


def test_members_that_are_not_trained_anyway_are_left_alone() -> None:
    draft = make_draft([1.0, 1.0, 1.0], length=[9, 9, 1], status=["excluded", "baseline_only", "train"])
    feed = OperatorFeed()
    assert feed.decide(Length(LengthConfiguration(max_tokens=5, action="drop")), draft) is draft
    assert feed.masked() == {}


@pytest.mark.parametrize(
    "options", [{}, {"min_tokens": 3, "max_tokens": 2}, {"min_tokens": 0}, {"max_tokens": 5, "action": "keep"}]
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LengthConfiguration(**options)
