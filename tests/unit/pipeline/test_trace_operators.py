"""A trace names the operators that a group has passed, as the run's manifest knows them."""

from __future__ import annotations

from typing import Any

import pytest
from stage_feed import make_config

from headrace.pipeline.trace_operators import Passed, kept_text
from headrace.schemas.records import Kept, RunEnd, RunManifest


def passed(monkeypatch: pytest.MonkeyPatch, config: str, policies: list[str]) -> Passed:
    records = [
        (None, RunManifest(run="r", created_ms=1, tokenizer_digest="", policies=policies, config=config)),
        (None, RunEnd(reason="steps", ended_ms=2)),
    ]
    monkeypatch.setattr("headrace.pipeline.trace_operators.read_records", lambda connection, topic: iter(records))
    nothing: Any = None
    return Passed(nothing)


def test_names_are_those_on_closed_groups_for_a_stream_and_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(
        policies={"a": {"model": "none"}, "b": {"model": "none"}},
        operators=[
            {"type": "length", "max_tokens": 9},
            {"type": "truncated", "policy": "b"},
            {"type": "dedup", "stream": "other"},
            {"type": "gone_since"},
            {"type": "edf"},
        ],
    )
    found = passed(monkeypatch, config.model_dump_json(), ["a", "b"])
    assert found.names("main", 0) == ["length", "gone_since"], "one whose package is missing is named all the same"
    assert found.names("main", 1) == ["length", "truncated", "gone_since"]
    assert found.names("other", 7) == ["length", "dedup", "gone_since"]


def test_a_manifest_without_a_configuration_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passed(monkeypatch, "", ["a"]).names("main", 0) == []


def test_what_shaping_made_of_the_reward_is_told() -> None:
    kept = Kept(policy=0, group=5, raw_mean=0.5, reward_mean=0.25)
    assert kept_text(kept, []) == "group 5 kept: mean reward 0.500"
    assert kept_text(kept, ["x", "y"]) == "group 5 kept by x, y: mean reward 0.500, 0.250 as shaped"
