"""Everything that only a trainer would refuse is refused by its check, without a model."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from trainer_feed import make_config

from headrace.schemas.config import RunConfig, dump_config
from headrace.schemas.errors import EXIT_CONFIGURATION, ConfigurationError
from headrace.trainers.check import check_settings, main

NOWHERE = Path("no-model")


def config_with(depth: float = 1, lag: int = 0, rollout: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    data = make_config(NOWHERE, NOWHERE, "checked", depth=depth, **trainer).model_dump()
    data["policies"]["main"]["lag"] = lag
    return RunConfig.model_validate({**data, "rollout": rollout or {}})


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
        ({"rollout": {"temperature": 0}}, "rollout.temperature is 0"),
        ({"lag": 3, "depth": 0, "loss_options": {"behave": {"action": "off"}}}, "lag 3, so data may be 3 versions old"),
        ({"backend": "torchh"}, "did you mean 'torch'"),
        ({"backend": "no.module:Class"}, "no.module"),
        ({"advantage": "gae", "backend": "headrace.trainers.backends.open:open_backend"}, "has no critic"),
        ({"advantage": "gae", "sequence_parallel": 2, "ranks": 2}, "a critic cannot share"),
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


NONSENSE = [
    ("losses", "ppo", {"clip_low": -0.2}), ("losses", "ppo", {"clip_high": float("nan")}),
    ("losses", "ppo", {"log_ratio_limit": 0}), ("losses", "ppo", {"log_ratio_limit": 1000}),
    ("losses", "ppo", {"dual_clip": 0.5}), ("losses", "dapo", {"dual_clip": float("nan")}),
    ("losses", "gspo", {"dual_clip": -1}), ("losses", "grpo", {"kl_weight": -1}),
    ("losses", "decoupled_ppo", {"behave": {"upper": 0.5, "lower": 3}}), ("losses", "tis", {"reject": [{"upper": 0}]}),
    ("losses", "m2po", {"budget": 0}), ("losses", "sapo", {"tau_positive": 0}), ("losses", "gmpo", {"clip_low": -1}),
    ("losses", "dppo", {"low": -1}), ("losses", "topr", {"negative_weight": -1}), ("losses", "cispo", {"clip_low": -1}),
    ("advantages", "group", {"epsilon": -1}), ("advantages", "pass_at_k", {"epsilon": 0}),
    ("advantages", "gpg", {"f_norm": 0}), ("advantages", "reinforce_pp", {"gamma": 2}),
    ("advantages", "gae", {"lam": -1}), ("advantages", "batch", {"epsilon": float("nan")}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "options"), NONSENSE, ids=str)
def test_numbers_that_would_train_nothing_or_the_wrong_way_are_refused(
    kind: str, name: str, options: dict[str, Any]
) -> None:
    given = {"losses": {"loss": name, "loss_options": options}}.get(
        kind, {"advantage": name, "advantage_options": options}
    )
    with pytest.raises(ConfigurationError, match=f"_options.{next(iter(options))}"):
        check_settings(config_with(**given))


@pytest.mark.parametrize(
    "setting",
    [
        {"max_grad_norm": -1}, {"betas": (1.5, 0.9)}, {"weight_decay": -1}, {"threads": 0}, {"lr": float("inf")},
        {"ranks": 4, "sequence_parallel": 3}, {"checkpoint_url": "stroe"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_torch_or_a_rank_would_choke_on_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=list(setting)[-1]):
        config_with(**setting)


def test_the_same_is_right_for_synchronous_data() -> None:
    check_settings(config_with(depth=0, loss_options={"behave": {"action": "off"}}))
