"""Spare replicas and spare groups."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from stage_feed import make_config, make_demand, make_driver, make_prompt, of_type

from headrace.pipeline.operators.replicate import ReplicateConfiguration
from headrace.pipeline.prompt_chain import resolved
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Admission, Task


@pytest.mark.parametrize(
    ("settings", "size", "extra", "groups"),
    [
        ({"preset": "flaky"}, 2, 1, 2),
        ({"preset": "flaky", "extra": 3}, 2, 3, 2),
        ({"preset": "flaky", "extra_groups": 0}, 2, 1, 0),
        ({"replicas": 6}, 6, 0, 0),
        ({"extra": 2}, 2, 2, 0),
        ({"extra_groups": 4}, 2, 0, 4),
    ],
)
def test_settings(settings: dict[str, Any], size: int, extra: int, groups: int) -> None:
    config = resolved(make_config(operators=[{"type": "replicate", **settings}]))
    stream = config.streams["main"]
    assert (stream.group_size, stream.extra_replicas, config.policies["main"].extra_groups) == (size, extra, groups)


def test_a_preset_of_the_paper_goes_by_the_sizes_of_group_and_batch() -> None:
    """36 x 12 over 32 x 8, the same when the configuration is resolved again, and rounded up elsewhere."""
    for size, batch, extra, groups in ((8, 32, 4, 4), (5, 12, 3, 2), (1, 1, 1, 1)):
        operator = {"type": "replicate", "preset": "roll_flash", "replicas": size}
        config = make_config(operators=[operator], trainer={"batch_groups": batch})
        for found in (resolved(config), resolved(resolved(config))):
            stream = found.streams["main"]
            assert (stream.group_size, stream.extra_replicas) == (size, extra)
            assert found.policies["main"].extra_groups == groups


def test_what_a_run_asks_for_beside_a_preset_must_agree_with_it() -> None:
    def config(operator: dict[str, Any], replicas: int = 0, groups: int = 0) -> RunConfig:
        made = make_config(operators=[{"type": "replicate", "preset": "flaky", **operator}])
        stream = made.streams["main"].model_copy(update={"extra_replicas": replicas})
        policy = made.policies["main"].model_copy(update={"extra_groups": groups})
        return made.model_copy(update={"streams": {"main": stream}, "policies": {"main": policy}})

    with pytest.raises(
        ConfigurationError, match=r"streams.main.extra_replicas is 4, and preset 'flaky' .* \(extra = 4\)"
    ):
        resolved(config({}, replicas=4))
    with pytest.raises(ConfigurationError, match=r"policies.main.extra_groups is 7, .* makes it 2: take the key out"):
        resolved(config({}, groups=7))
    agreed = resolved(config({}, replicas=1, groups=2))
    assert (agreed.streams["main"].extra_replicas, agreed.policies["main"].extra_groups) == (1, 2)
    said = resolved(config({"extra": 3, "extra_groups": 1}, replicas=4, groups=7))
    assert (said.streams["main"].extra_replicas, said.policies["main"].extra_groups) == (3, 1)


def test_every_replica_is_a_task_of_its_own() -> None:
    config = make_config(operators=[{"type": "replicate", "replicas": 3, "extra": 1}])
    driver = make_driver(config, "schedule")
    driver.append("prompts", make_prompt(0))
    for worker in ("w0", "w1"):
        driver.append("demand", make_demand(worker, capacity=2))
    driver.settle()
    (admission,) = of_type(driver, "admissions", Admission)
    assert (admission.group_size, admission.extra_replicas) == (3, 1)
    tasks = of_type(driver, "tasks", Task)
    assert sorted(t.replica for t in tasks) == [0, 1, 2, 3]
    assert {t.worker for t in tasks} == {"w0", "w1"}, "replicas of one prompt go to whoever has room"


def test_nothing_to_do_is_refused() -> None:
    with pytest.raises(ValidationError, match="give preset, replicas, extra or extra_groups"):
        ReplicateConfiguration()
