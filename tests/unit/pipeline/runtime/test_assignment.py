"""Tasks from what a group gives, and the partitions of a sweep."""

from __future__ import annotations

import pytest

from headrace.pipeline.runtime.assignment import input_places, output_places, tasks_of
from headrace.schemas.errors import ConfigurationError, HeadraceError
from headrace.schemas.topics import partition_counts

COUNTS = partition_counts(["a", "b"], groups=4, inboxes=8, lanes=2)


def test_the_holder_of_the_prompts_runs_schedule_over_everything() -> None:
    tasks = tasks_of("schedule", [("prompts", 0)], COUNTS)
    assert tasks == {
        0: (("prompts", 0), ("demand", 0), ("ledger", 0), ("ledger", 1), ("steps", 0), ("steps", 1)),
    }


def test_whoever_got_the_rest_of_schedule_runs_nothing() -> None:
    assert tasks_of("schedule", [("demand", 0), ("ledger", 0), ("steps", 1)], COUNTS) == {}


def test_the_others_have_a_task_per_partition_number() -> None:
    given = [("trajectories", 2), ("admissions", 2), ("trajectories", 3), ("admissions", 3)]
    assert tasks_of("assemble", given, COUNTS) == {
        2: (("trajectories", 2), ("admissions", 2)),
        3: (("trajectories", 3), ("admissions", 3)),
    }
    assert set(tasks_of("batch", input_places("batch", COUNTS), COUNTS)) == {0, 1}


def test_a_group_that_did_not_co_partition_is_refused() -> None:
    with pytest.raises(HeadraceError, match="range assignor"):
        tasks_of("assemble", [("trajectories", 2), ("admissions", 3)], COUNTS)


def test_inputs_that_are_partitioned_differently_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="admissions 5"):
        input_places("assemble", {**COUNTS, "admissions": 5})


def test_a_sweep_touches_everything_that_the_stage_writes() -> None:
    topics = {sub: {topic for topic, _ in output_places(sub, COUNTS)} for sub in ("schedule", "assemble", "batch")}
    assert topics["schedule"] >= {"tasks", "admissions", "ledger", "run", "dead-letters", "schedule-state-changelog"}
    assert topics["assemble"] == {"groups", "ledger", "dead-letters", "assemble-state-changelog"}
    assert topics["batch"] == {
        "batches.a", "batches.b", "manifests", "ledger", "dead-letters", "batch-state-changelog",
    }  # fmt: skip
    assert sum(topic == "tasks" for topic, _ in output_places("schedule", COUNTS)) == 8
