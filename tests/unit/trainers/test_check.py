"""Everything that only a trainer would refuse is refused by its check, without a model."""

from pathlib import Path
from typing import Any

import pytest
from trainer_feed import make_config

from headrace.schemas.config import RunConfig, dump_config
from headrace.schemas.errors import EXIT_CONFIGURATION
from headrace.trainers.check import check_settings, main

NOWHERE = Path("no-model")


def config_with(depth: float = 1, rollout: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    config = make_config(NOWHERE, NOWHERE, "checked", depth=depth, **trainer)
    return RunConfig.model_validate({**config.model_dump(), "rollout": rollout or {}})


def test_what_trains_passes() -> None:
    for loss in ("decoupled_ppo", "grpo", "m2po"):
        check_settings(config_with(loss=loss))
    check_settings(config_with(backend="deepspeed"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"loss": "gropo"}, "did you mean"),
        ({"loss_options": {"clip_lo": 0.1}}, "trainer.loss_options.clip_lo"),
        ({"loss_options": {"behave": {"action": "off"}}}, "does not correct"),
        ({"advantage": "mean"}, "headrace.advantages has no 'mean'"),
        ({"advantage_options": {"eps": -1, "x": 1}}, "trainer.advantage_options"),
        ({"aggregation": "mean"}, "trainer.aggregation"),
        ({"rollout": {"top_p": 0.9}}, "top_p"),
        ({"rollout": {"top_k": 5}}, "top_k"),
        ({"backend": "deepspeed", "options": {"zero_optimization": {"stage": 2}}, "zero_stage": 1}, "zero_stage"),
    ],
    ids=str,
)
def test_what_a_trainer_would_refuse_is_refused_in_words(
    settings: dict[str, Any], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    dump_config(config_with(**settings), file)
    assert main(["--config", str(file)]) == EXIT_CONFIGURATION
    said = capfd.readouterr().err
    assert said.startswith("configuration error: ") and reason in said


def test_the_same_is_right_for_synchronous_data() -> None:
    check_settings(config_with(depth=0, loss_options={"behave": {"action": "off"}}))
