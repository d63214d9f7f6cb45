"""Shares over streams and over classes within a stream."""

from __future__ import annotations

import random
from typing import Any

import pytest
from prompt_feed import PromptFeed, make_offer
from pydantic import ValidationError

from headrace.pipeline import flow
from headrace.pipeline.operators.mix import Mix, MixConfiguration
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError


def feed(**settings: Any) -> PromptFeed:
    return PromptFeed(Mix, MixConfiguration.model_validate(settings))


def turn(made: PromptFeed, present: list[str], absent: tuple[str, ...] = ()) -> list[str]:
    return list(made.operator.select(present, absent))


def test_streams_take_turns_by_weight_and_go_on_after_a_restart() -> None:
    made, order = feed(weights={"a": 3, "b": 1}), []
    for position in range(40):
        (stream,) = turn(made, ["b", "a"])
        assert made.offer(make_offer("p", position, stream=stream)) == ""
        order.append(stream)
        made.restart()
    assert order[:4] == ["a", "a", "b", "a"] and order.count("a") == 30


def test_a_stream_without_a_prompt_is_waited_for_or_lent_to() -> None:
    waiting, lending = feed(weights={"a": 1, "b": 1}), feed(weights={"a": 1, "b": 1}, missing="lend")
    for made in (waiting, lending):
        assert turn(made, ["a"], ("b",)) == ["a"], "it is a's turn"
        made.offer(make_offer("p", 0, stream="a"))
    assert turn(waiting, ["a"], ("b",)) == []
    assert turn(waiting, ["a"]) == ["a"], "b has ended and leaves its share"
    for position in range(1, 4):
        assert turn(lending, ["a"], ("b",)) == ["a"]
        lending.offer(make_offer("p", position, stream="a"))
    repaid = []
    for position in range(4, 10):
        (stream,) = turn(lending, ["a", "b"])
        lending.offer(make_offer("p", position, stream=stream))
        repaid.append(stream)
    assert repaid == ["b", "b", "b", "b", "a", "b"]
    assert lending.operator._quota.counts == {"a": 5, "b": 5}


def test_a_stream_that_is_not_mixed_is_left_alone() -> None:
    made = feed(weights={"a": 1, "b": 1})
    assert turn(made, ["other"], ("a",)) == ["other"]
    assert turn(made, ["other", "b", "a"]) == ["other", "a"]


def test_classes_within_a_stream_are_dropped_when_they_are_ahead() -> None:
    made, r, admitted = feed(by="kind", weights={"code": 1, "math": 1}), random.Random(3), {"code": 0, "math": 0}
    for position in range(2000):
        kind = "math" if r.random() < 0.9 else "code"
        reason = made.offer(make_offer(f"p{position}", position, columns={"kind": kind}))
        assert reason in ("", "source_ahead")
        admitted[kind] += reason == ""
    assert admitted["code"] > 150 and abs(admitted["math"] - admitted["code"]) <= 2
    assert made.offer(make_offer("p", 0, columns={"kind": "essay"})) == "source_unnamed"
    assert made.offer(make_offer("p")) == "source_unnamed"


@pytest.mark.parametrize("by", ["dataset", "task_type"])
def test_classes_may_be_fields_of_the_prompt(by: str) -> None:
    made = feed(by=by, weights={"one": 1, "two": 1})
    assert [made.offer(make_offer("p", n, **{by: "one"})) for n in range(2)] == ["", "source_ahead"]
    assert made.offer(make_offer("p", 3, **{by: "two"})) == ""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"weights": {}}, "at least 1"),
        ({"weights": {"a": 0}}, "greater than 0"),
        ({"weights": {"a": float("nan")}}, "finite"),
        ({"weights": {"a": 1}, "by": "task_type", "missing": "lend"}, "belongs to by = 'stream'"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        MixConfiguration.model_validate(settings)


def config(*operators: dict[str, Any], **streams: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "policies": {"p": {"model": "none"}, "q": {"model": "none"}},
            "streams": {name: {"dataset": "none", **more} for name, more in streams.items()},
            "operators": list(operators),
        }
    )


def test_streams_that_cannot_be_mixed_are_refused_with_the_reason() -> None:
    mix = {"type": "mix", "weights": {"a": 1, "b": 1}}
    flow.validate(config(mix, a={}, b={}))
    with pytest.raises(ConfigurationError, match="they train different policies"):
        flow.validate(config(mix, a={"policies": ["p"]}, b={"policies": ["q"]}))
    with pytest.raises(ConfigurationError, match="weights names a, b; the streams that it mixes are a, b, c"):
        flow.validate(config(mix, a={}, b={}, c={}))
    with pytest.raises(ConfigurationError, match=r"operators\[1\] \(mix\) stands at operators\[0\] too for stream a"):
        flow.validate(config(mix, mix, a={}, b={}))
