"""The names under which figures leave headrace, and the words for a package that is not there."""

import pytest

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Step
from headrace.trainers.sinks.sink import flat_settings, metrics_of, required, said


def step(**metrics: float) -> Step:
    return Step(
        policy=0, batch=7, version=9, lineage=1, updates=2, loss=0.5, tokens=100, sequences=8, wait_seconds=1.5,
        step_seconds=0.25, publish_seconds=0.125, delta_bytes=64, changed_share=0.01, finished_ms=1, metrics=metrics,
    )  # fmt: skip


def test_a_step_is_known_by_the_names_of_the_field() -> None:
    found = metrics_of(
        step(**{"reward/mean": 0.5, "seq_len/mean": 12.0, "entropy": 1.1, "behave_kl/k3": 0.02, "optim/grad_norm": 3.0})
    )
    assert {
        "reward/mean": 0.5, "seq_len": 12.0, "entropy": 1.1, "mismatch_kl": 0.02, "optim/grad_norm": 3.0,
        "time/wait_for_batch": 1.5, "time/step": 0.25, "loss": 0.5, "batch": 7.0, "lineage": 1.0,
    }.items() <= found.items()  # fmt: skip
    assert all(isinstance(value, float) for value in found.values())


def test_what_is_not_finite_is_left_out_and_an_own_name_wins() -> None:
    found = said({"a": float("nan"), "b": float("inf"), "c": 1, "mismatch_kl": 5.0, "behave_kl/k3": 1.0})
    assert found == {"c": 1.0, "mismatch_kl": 5.0, "behave_kl/k3": 1.0}


def test_settings_are_flat() -> None:
    assert flat_settings({"a": {"b": {"c": 1}}, "d": None, "e": {}, "f": [1]}) == {
        "a.b.c": 1, "d": "None", "e": "{}", "f": "[1]",
    }  # fmt: skip


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'headrace\[wandb\]'"):
        required("no_such_package_of_anybody", "wandb", "wandb")
