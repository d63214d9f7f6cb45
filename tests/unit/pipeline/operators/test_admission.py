"""Admission depth as an operator, whole and fractional, and by ROLL Flash's one number."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from stage_feed import make_config

from headrace.pipeline import flow
from headrace.pipeline.credits import Credits
from headrace.pipeline.operators.admission import AdmissionConfiguration
from headrace.pipeline.prompt_chain import resolved
from headrace.schemas.errors import ConfigurationError


@pytest.mark.parametrize(
    ("settings", "depth", "bound", "groups"),
    [
        ({"depth": 0}, 0, 0, 8),
        ({"depth": 0.3}, 0.3, 1, 11),
        ({"depth": 1.5}, 1.5, 2, 20),
        ({"depth": 1, "max_staleness": 5}, 1, 5, 16),
        ({"alpha": 0}, 0, 0, 8),
        ({"alpha": 0.5}, 0.5, 1, 12),
        ({"alpha": 2}, 2, 2, 24),
    ],
)
def test_depth_bound_and_groups_in_flight(settings: dict[str, Any], depth: float, bound: int, groups: int) -> None:
    config = resolved(make_config(operators=[{"type": "admission", **settings}], trainer={"batch_groups": 8}))
    policy = config.policies["main"]
    assert (policy.depth, policy.staleness_bound()) == (depth, bound)
    p = Credits(config, frozenset()).policies[0]
    while p.room()[0]:
        p.rolling += 1
    assert p.rolling == groups
    assert resolved(config) == config


def test_alpha_counts_on_from_lag() -> None:
    config = make_config(policies={"main": {"model": "none", "lag": 1}}, operators=[{"type": "admission", "alpha": 2}])
    assert resolved(config).policies["main"].max_staleness == 3


def test_it_concerns_the_policy_that_it_names() -> None:
    policies = {"a": {"model": "none"}, "b": {"model": "none"}}
    config = resolved(make_config(policies=policies, operators=[{"type": "admission", "depth": 3, "policy": "b"}]))
    assert [p.depth for p in config.policies.values()] == [1, 3]


def test_what_cannot_be_is_refused() -> None:
    for settings in (
        {},
        {"depth": 1, "alpha": 1},
        {"alpha": 1, "max_staleness": 2},
        {"depth": -1},
        {"depth": float("inf")},
    ):
        with pytest.raises(ValidationError):
            AdmissionConfiguration.model_validate(settings)
    config = make_config(operators=[{"type": "admission", "depth": 3, "max_staleness": 1}])
    with pytest.raises(ConfigurationError, match=r"with operators\[0\] \(admission\): .*depth 3.* needs at least 3"):
        flow.validate(config)
    twice = [{"type": "admission", "depth": 1}, {"type": "admission", "depth": 2, "policy": "main"}]
    with pytest.raises(ConfigurationError, match=r"operators\[1\] \(admission\) stands at operators\[0\] too"):
        flow.validate(make_config(operators=twice))
    late = [{"type": "greso"}, {"type": "admission", "depth": 1}]
    with pytest.raises(ConfigurationError, match=r"admission, settings.* stands after greso"):
        flow.validate(make_config(operators=late))
