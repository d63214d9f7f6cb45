"""``route``: what a policy takes, and that one trajectory feeds two trainers, one, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_feed import OperatorFeed, make_draft
from pydantic import ValidationError
from stage_feed import make_admission, make_config, make_driver, make_sequence, make_trajectory, of_type

from headrace.pipeline.operators.operator import GroupDraft
from headrace.pipeline.operators.route import Route, RouteConfiguration
from headrace.schemas.parts import AdmittedPolicy
from headrace.schemas.records import Closed, Group, Member


def draft(**fields: Any) -> GroupDraft:
    made = make_draft([0.0, 1.0])
    return replace(made, group=replace(made.group, **fields))


def decide(made: GroupDraft, **settings: Any) -> str:
    ended = OperatorFeed().decide(Route(RouteConfiguration.model_validate(settings)), made)
    return "taken" if isinstance(ended, GroupDraft) else ": ".join(ended)


@pytest.mark.parametrize(
    ("fields", "settings", "decision"),
    [
        ({"stream": "math"}, {"streams": ["math", "code"]}, "taken"),
        ({"stream": "web"}, {"streams": ["math", "code"]}, "other_stream: 'web' is none of math, code"),
        ({"task_type": "sum"}, {"task_types": ["sum"]}, "taken"),
        ({"task_type": ""}, {"task_types": ["sum"]}, "other_task_type: '' is none of sum"),
        ({"raw_mean": 0.5}, {"low": 0.5, "high": 0.5}, "taken"),
        ({"raw_mean": 0.4}, {"low": 0.5}, "reward_below: mean 0.4 is below 0.5"),
        ({"raw_mean": 0.6}, {"high": 0.5}, "reward_above: mean 0.6 is above 0.5"),
        ({"raw_mean": float("nan")}, {"high": 0.5}, "reward_unknown: the mean is nan"),
        ({"oldest_version": 3, "newest_version": 5}, {"from_version": 3, "to_version": 3, "max_span": 2}, "taken"),
        ({"oldest_version": 0}, {"to_version": 0}, "taken"),
        ({"oldest_version": 2}, {"from_version": 3}, "version_below: 2 is below 3"),
        ({"oldest_version": 4}, {"to_version": 3}, "version_above: 4 is above 3"),
        (
            {"oldest_version": 3, "newest_version": 6},
            {"max_span": 2},
            "span_above: versions 3 to 6 are more than 2",
        ),
    ],
)
def test_rules(fields: dict[str, Any], settings: dict[str, Any], decision: str) -> None:
    assert decide(draft(**fields), **settings) == decision


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "it takes everything: give one of streams"),
        ({"low": 1, "high": 0}, "it would take nothing"),
        ({"from_version": 3, "to_version": 2}, "it would take nothing"),
        ({"low": float("nan")}, "finite"),
        ({"policy": "a", "steams": []}, "extra"),
    ],
)
def test_rules_that_make_no_sense_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        RouteConfiguration.model_validate(settings)


@pytest.mark.parametrize(
    ("task_type", "kept", "refused"),
    [("sum", [0, 1], []), ("code", [1], [0]), ("chat", [], [0, 1])],
)
def test_one_trajectory_feeds_two_trainers_one_or_none(task_type: str, kept: list[int], refused: list[int]) -> None:
    config = make_config(
        policies={"small": {"model": "none"}, "large": {"model": "none"}},
        operators=[
            {"type": "route", "policy": "small", "task_types": ["sum"]},
            {"type": "route", "policy": "large", "task_types": ["sum", "code"]},
        ],
    )
    driver = make_driver(config, "assemble")
    both = [AdmittedPolicy(policy=p, min_version=0, cap=4) for p in (0, 1)]
    driver.append("admissions", make_admission(0, policies=both, task_type=task_type))
    for replica in range(2):
        sequences = [make_sequence(policy=p, tokens=2 + p) for p in (0, 1)]
        driver.append("trajectories", make_trajectory(0, replica, float(replica), sequences=sequences))
    driver.settle()
    assert [g.policy for g in of_type(driver, "groups", Group)] == kept
    for policy in kept:
        members = of_type(driver, "groups", Member, policy)
        assert [s.policy for m in members for s in m.sequences] == [policy] * 2, "each its own tokens"
        assert [m.length for m in members] == [2 + policy] * 2
    closed = of_type(driver, "ledger", Closed)
    assert [(c.policy, c.reason, c.operator) for c in closed] == [(p, "filtered", "route") for p in refused]
    assert all(c.detail.startswith("other_task_type: ") for c in closed)
