"""What was cut off is not trained, by the end reasons that the configuration names."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from operator_feed import OperatorFeed, make_draft, statuses
from pydantic import ValidationError

from headrace.pipeline.operators.truncated import EndReason, Truncated, TruncatedConfiguration
from headrace.schemas.data_records import END_REASONS


def applied(ends: list[str], **options: Any) -> Any:
    return OperatorFeed().decide(
        Truncated(TruncatedConfiguration(**options)), make_draft([1.0] * len(ends), end_reason=ends)
    )


def test_answers_at_the_limit_are_masked_and_those_that_stopped_are_trained() -> None:
    result = applied(["stop", "length", "context_full", "env_timeout"])
    assert statuses(result) == "tbbt" and result.group.counted == 4


def test_the_reasons_that_count_are_a_setting() -> None:
    assert statuses(applied(["stop", "length", "abort"], end_reasons=["abort"])) == "ttb"
    assert applied(["length"] * 2) == ("truncated_length", "of 2 members to train: 2 truncated_length")
    dropped = applied(["stop", "length"], action="drop")
    assert dropped == ("truncated_length", "of 2 members to train: 1 truncated_length")


def test_the_closed_list_is_that_of_the_records() -> None:
    assert get_args(EndReason) == END_REASONS
    for wrong in (["cut"], []):
        with pytest.raises(ValidationError):
            TruncatedConfiguration(end_reasons=wrong)  # type: ignore[arg-type]
