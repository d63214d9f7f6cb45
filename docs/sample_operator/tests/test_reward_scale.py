"""The operator keeps what every operator must keep, and its settings are checked."""

import pytest
from headrace_reward_scale.operator import RewardScaleConfiguration
from pydantic import ValidationError

from headrace.pipeline.operator_conformance import assert_conforms


def test_it_decides_the_same_each_time_and_after_every_restart() -> None:
    assert_conforms("headrace_reward_scale.operator:RewardScale", {"after": 4}, groups=14)


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings in ({"floor": 0}, {"after": 1}, {"other": 1}):
        with pytest.raises(ValidationError):
            RewardScaleConfiguration(**settings)
