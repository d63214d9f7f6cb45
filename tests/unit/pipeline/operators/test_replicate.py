"""Spare replicas and spare groups."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from stage_feed import make_config, make_demand, make_driver, make_prompt, of_type

from headrace.pipeline.operators.replicate import ReplicateConfiguration
from headrace.pipeline.prompt_chain import resolved
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
