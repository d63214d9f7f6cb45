"""The topology as data, and configurations that cannot work."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
from stage_feed import make_config

from headrace.pipeline import flow
from headrace.pipeline.operators.dynamic_sampling import DynamicSampling
from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.topics import SUB_TOPOLOGIES, TOPICS


class Shape(DynamicSampling):
    kind: ClassVar[Any] = "shape"


class Downsample(DynamicSampling):
    kind: ClassVar[Any] = "downsample"


class Odd(DynamicSampling):
    kind: ClassVar[Any] = "odd"


class Unmade(DynamicSampling):
    def __init__(self, configuration: Any) -> None:
        raise KeyError("depth")


class TakenConfiguration(OperatorConfiguration):
    policy: str = ""


class Taken(DynamicSampling):
    Configuration: ClassVar[type[OperatorConfiguration]] = TakenConfiguration


class Bare:
    kind: ClassVar[Any] = "filter"
    Configuration = DynamicSampling.Configuration

    def open(self, context: Any) -> None: ...


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators named after their kinds."""
    classes = {"shape": Shape, "filter": DynamicSampling, "downsample": Downsample, "odd": Odd}
    for module in ("flow", "operator_chain", "prompt_chain", "serving"):
        monkeypatch.setattr(f"headrace.pipeline.{module}.operator_class", lambda entry: classes[entry.type])


def operators(*names: str, **more: Any) -> Any:
    return make_config(operators=[{"type": name, **more} for name in names])


def test_every_stage_has_a_factory_and_its_topics_are_described() -> None:
    assert set(flow.STAGES) == set(SUB_TOPOLOGIES) == set(flow.FILES)
    text = flow.describe(make_config(operators=[{"type": "dynamic_sampling"}]))
    for topic in TOPICS:
        assert f"  {topic.name}" in text
    for name, file in flow.FILES.items():
        assert f"{name}" in text and file in text
    assert "dynamic_sampling   filter, everywhere" in text
    assert "prompts, demand, ledger, steps -> run, tasks, admissions, ledger" in text


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize(
    "order",
    [("shape", "filter", "downsample"), ("shape", "shape"), ("filter",), (), ("shape", "downsample", "downsample")],
)
def test_orders_that_work(order: tuple[str, ...]) -> None:
    flow.validate(operators(*order))


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("order", [("filter", "shape"), ("downsample", "filter"), ("shape", "downsample", "shape")])
def test_orders_that_cannot_work_are_refused_by_name(order: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"the order is .*shape, statistics, filter, downsample"):
        flow.validate(operators(*order))


@pytest.mark.usefixtures("kinds")
def test_the_order_is_judged_per_policy() -> None:
    policies = {"a": {"model": "none"}, "b": {"model": "none"}}
    flow.validate(
        make_config(policies=policies, operators=[{"type": "filter", "policy": "a"}, {"type": "shape", "policy": "b"}])
    )
    with pytest.raises(ConfigurationError, match=r"operators\[1\] \(shape, shape\) stands after filter"):
        flow.validate(make_config(policies=policies, operators=[{"type": "filter"}, {"type": "shape", "policy": "b"}]))


@pytest.mark.usefixtures("kinds")
def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kind 'odd'"):
        flow.validate(operators("odd"))


REPLAY = {"type": "replay", "ratio": 0.5}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: make_config(operators=[{"type": "dynamic_samplin"}]), "did you mean 'dynamic_sampling'"),
        (lambda: make_config(operators=[{"type": "dynamic_sampling", "tolerance": -1}]), "tolerance"),
        (
            lambda: make_config(operators=[{"type": "dynamic_sampling", "speed": 1}]),
            "unknown key speed; keys are toler",
        ),
        (lambda: make_config(operators=[{"type": "dynamic_sampling", "tolerence": 1}]), "did you mean tolerance"),
        (lambda: make_config(operators=[{"type": "json:loads"}]), "must be a class with kind and Configuration"),
        (
            lambda: make_config(operators=[{"type": f"{__name__}:Unmade"}]),
            "cannot be made: it raised KeyError: 'depth' .test_f",
        ),
        (
            lambda: make_config(operators=[{"type": f"{__name__}:Bare"}]),
            "of kind filter has no method process, on_timer, close",
        ),
        (lambda: make_config(operators=[{"type": f"{__name__}:Taken"}]), "has a key policy of its own"),
        (lambda: make_config(operators=[{"type": "greso", "easy_from": math.nan}]), "easy_from: .*finite"),
        (lambda: make_config(operators=[{"type": "curriculum", "ceiling": [(0, math.nan)]}]), "ceiling.*finite"),
        (
            lambda: make_config(
                operators=[{"type": "curriculum", "bounds": [1], "phases": [{"weights": [1, math.inf]}]}]
            ),
            "phases.0.weights.1: .*finite",
        ),
        (
            lambda: make_config(operators=[{"type": "admission", "depth": 0}, REPLAY]),
            "bound of staleness is 0 at depth 0",
        ),
        (lambda: make_config(operators=[{"type": "dynamic_sampling", "stream": "x"}]), "streams are main"),
        (lambda: make_config(operators=[{"type": "dynamic_sampling", "policy": "x"}]), "policies are main"),
        (lambda: make_config(pacing="slow"), "pacing is 'slow'"),
        (lambda: make_config(workflow="none"), "headrace.workflows has no 'none'"),
        (lambda: make_config(reward="none"), "headrace.rewards has no 'none'"),
        (lambda: make_config(group_reward="exact_match"), "group_reward is 'exact_match', which scores single"),
        (lambda: make_config(workflow_options={"turns": 3}), "workflow 'single_turn' has none, turns given"),
        (lambda: make_config(workflow="multi_turn"), "workflow 'multi_turn'.*environment"),
    ],
)
def test_what_cannot_work_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        flow.validate(config())


def test_streams_with_a_reward_over_the_group_wait_for_a_score() -> None:
    assert flow.scored_streams(make_config()) == frozenset()
    assert flow.scored_streams(make_config(reward="diversity")) == {"main"}
    assert flow.scored_streams(make_config(group_reward="diversity")) == {"main"}


def test_only_policies_with_a_filter_admit_more_than_they_need() -> None:
    policies = {"a": {"model": "none"}, "b": {"model": "none"}}
    assert flow.filtered_policies(make_config(policies=policies)) == frozenset()
    some = make_config(policies=policies, operators=[{"type": "dynamic_sampling", "policy": "b"}])
    assert flow.filtered_policies(some) == frozenset({1})
