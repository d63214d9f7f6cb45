"""Where a configuration names plug-ins of a kind, and that each use is checked by its key."""

from __future__ import annotations

from typing import Any

import pytest
from stage_feed import make_config

from headrace.pipeline.plugin_uses import check_uses, uses_of
from headrace.schemas.errors import ConfigurationError

TWO = {"a": {"model": "none"}, "b": {"model": "none", "trainer": {"loss": "ppo"}}}


@pytest.mark.parametrize(
    ("kind", "uses"),
    [
        ("engines", [("rollout.engine", "transformers")]),
        ("losses", [("trainer.loss", "grpo"), ("policies.b.trainer.loss", "ppo")]),
        ("workflows", [("streams.main.workflow", "single_turn")]),
        ("rewards", [("streams.main.reward", "exact_match")]),
        ("datasets", [("streams.main.format", "jsonl")]),
        ("environments", []),
    ],
)
def test_each_use_has_its_key(kind: str, uses: list[tuple[str, str]]) -> None:
    config = make_config(policies=TWO, format="jsonl", trainer={"loss": "grpo"})
    assert [(use.where, use.name) for use in uses_of(config, kind)] == uses


def test_a_file_whose_format_goes_by_its_name_names_no_plug_in() -> None:
    assert list(uses_of(make_config(), "datasets")) == []


def test_a_kind_that_no_configuration_names_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="names no sinks"):
        list(uses_of(make_config(), "sinks"))


@pytest.mark.parametrize(
    ("kind", "stream", "says"),
    [
        ("rewards", {"reward": "exact_matc"}, "streams.main.reward: .*did you mean 'exact_match'"),
        ("rewards", {"reward_options": {"speed": 1}}, "streams.main.reward_options.speed: .*exact_match knows"),
        ("datasets", {"format": "jsonll"}, "streams.main.format: .*did you mean 'jsonl'"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(kind: str, stream: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_uses(make_config(**stream), kind)


def test_a_use_that_works_is_shown_with_the_object_behind_it() -> None:
    ((use, found),) = check_uses(make_config(), "rewards")
    assert (use.name, found) == ("exact_match", "headrace.pipeline.rewards.exact_match:ExactMatch")
