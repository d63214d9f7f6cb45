"""Rights by role: exactly what each role's part of the run needs, worked out from the map, and no more."""

from __future__ import annotations

import pytest

from headrace.schemas.access import ROLES, Grant, grants_of
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.topics import STORES, TOPICS

WRITES = {
    "launcher": {"run"},
    "source": {"prompts", "dead-letters"},
    "operators": {
        "run", "tasks", "admissions", "groups", "ledger", "batches.", "manifests", "dead-letters",
        "schedule-state-changelog", "assemble-state-changelog", "batch-state-changelog",
    },
    "rollout": {"demand", "trajectories", "partials", "evals", "dead-letters"},
    "trainer": {"steps", "deltas"},
    "inspector": set(),
}  # fmt: skip
"""As a person who reads the protocol would say it; the code works it out from the map."""


def names(role: str, operation: str, resource: str = "topic") -> set[str]:
    return {
        grant.name.removeprefix("r.")
        for grant in grants_of("r")
        if (grant.role, grant.operation, grant.resource) == (role, operation, resource)
    }


@pytest.mark.parametrize("role", ROLES)
def test_what_each_role_writes(role: str) -> None:
    assert names(role, "WRITE") == WRITES[role]


def test_what_each_role_reads() -> None:
    assert names("source", "READ") == {"prompts", "run"}
    assert {"tasks", "deltas", "run", "partials"} <= names("rollout", "READ")
    assert all("run" in names(role, "READ") for role in ("source", "operators", "rollout", "trainer"))
    assert names("rollout", "READ").isdisjoint({"batches.", "ledger", "steps", "manifests"})
    assert {"batches.", "manifests", "steps", "deltas", "run"} <= names("trainer", "READ")
    assert names("trainer", "READ").isdisjoint({"prompts", "trajectories", "tasks", "demand"})
    inputs = {"prompts", "demand", "ledger", "steps", "trajectories", "admissions", "groups"}
    assert inputs <= names("operators", "READ")
    assert names("launcher", "READ") == names("inspector", "READ") == {""}


def test_the_inspector_changes_nothing_and_only_the_launcher_makes_topics() -> None:
    assert {grant.operation for grant in grants_of("r") if grant.role == "inspector"} <= {
        "READ", "DESCRIBE", "DESCRIBE_CONFIGS",
    }  # fmt: skip
    for operation in ("CREATE", "DELETE"):
        assert {grant.role for grant in grants_of("r") if grant.operation == operation} == {"launcher"}


def test_transactional_ids_and_groups_are_their_owners() -> None:
    owners = {g.name: g.role for g in grants_of("r") if g.resource == "transactional_id"}
    assert owners == {
        "r.schedule.": "operators", "r.assemble.": "operators", "r.batch.": "operators",
        "r.source.": "source", "r.trainer.": "trainer",
    }  # fmt: skip
    groups = {g.name: g.role for g in grants_of("r") if g.resource == "group" and g.operation == "READ"}
    assert groups == {
        "r.schedule": "operators", "r.assemble": "operators", "r.batch": "operators", "r.trainer.": "trainer",
    }  # fmt: skip


def test_nothing_reaches_beyond_the_run() -> None:
    for grant in grants_of("r"):
        assert grant.name.startswith("r."), grant
    assert not {g.name for g in grants_of("r")} & {g.name for g in grants_of("r2")}


def test_every_topic_and_changelog_has_a_writer_and_a_reader_among_the_roles() -> None:
    written = {name for role in ROLES for name in names(role, "WRITE")}
    wanted = {f"{spec.name}." if spec.per_policy else spec.name for spec in TOPICS}
    wanted |= {f"{sub}-{store}-changelog" for sub, stores in STORES.items() for store in stores}
    assert written == wanted


def test_every_stage_of_the_map_belongs_to_one_role() -> None:
    stages = [stage for stages in ROLES.values() for stage in stages]
    assert len(stages) == len(set(stages))
    assert {writer for spec in TOPICS for writer in spec.writers} <= set(stages)


def test_grants_are_in_a_fixed_order_without_repeats_and_a_bad_run_is_refused() -> None:
    grants = grants_of("r")
    assert grants == sorted(set(grants)) and grants == grants_of("r")
    assert Grant("trainer", "topic", "r.batches.", True, "READ") in grants
    with pytest.raises(ConfigurationError, match="run id"):
        grants_of("*")
