"""Who may do what on a cluster: the least rights of each role of a run, worked out from the map of topics.

A role is a login: the source, the operators, rollout workers, trainers, the launcher, and people who only look. What a
role writes and reads is what its stages do in ``topics.TOPICS``, and the little beyond it that is named here; what is
not listed is refused by a cluster with an authorizer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.schemas.ids import changelog_topic, check_run_id, consumer_group, topic_name, transactional_id
from headrace.schemas.topics import STORES, SUB_TOPOLOGIES, TOPICS, TopicSpec

__all__ = ("LAUNCHER", "LOOKER", "ROLES", "Grant", "grants_of")

ROLES: Mapping[str, tuple[str, ...]] = {
    "launcher": ("flow",),
    "source": ("dataset_to_prompt",),
    "operators": ("prompt_to_task", "trajectory_to_group", "group_to_batch"),
    "rollout": ("task_to_trajectory", "delta_to_worker"),
    "trainer": ("batch_to_step", "step_to_delta"),
    "inspector": (),
}
"""Roles and the stages of the map that each runs."""
LAUNCHER, LOOKER = "launcher", "inspector"
"""The role that makes and removes a run's topics, and the one that reads everything and changes nothing."""

_EVERYONE_READS = ("run",)
"""What is fixed when a run is created, and whether it has ended."""
_LOOKS_BACK: Mapping[str, tuple[str, ...]] = {
    "source": ("prompts",),
    "trainer": ("steps", "deltas", "manifests"),
}
"""Topics that a role reads beyond the map: where it was when it ended."""

Operation = Literal["READ", "WRITE", "DESCRIBE", "CREATE", "DELETE", "DESCRIBE_CONFIGS"]
Resource = Literal["topic", "group", "transactional_id"]


@dataclass(frozen=True, slots=True, order=True)
class Grant:
    """One right: ``role`` may do ``operation`` on a resource of this name, or of names that begin so."""

    role: str
    resource: Resource
    name: str
    prefixed: bool
    operation: Operation


def grants_of(run: str) -> list[Grant]:
    """Every right that the roles of a run need, in a fixed order. Raises ConfigurationError for a bad run id."""
    check_run_id(run)
    return sorted({grant for role in ROLES for grant in _of_role(run, role)})


def _of_role(run: str, role: str) -> Iterator[Grant]:
    yield Grant(role, "group", f"{run}.reader.", True, "DESCRIBE")  # readers without a group ask for a coordinator too
    for spec in TOPICS:
        yield from _on_topic(run, role, spec)
    if role == "operators":
        for sub, stores in STORES.items():
            yield Grant(role, "group", consumer_group(run, sub), False, "READ")
            yield from _transactions(run, role, sub)
            for store in stores:
                for operation in ("READ", "WRITE"):
                    yield Grant(role, "topic", topic_name(run, changelog_topic(sub, store)), False, operation)
    elif role == "source":
        yield Grant(role, "group", consumer_group(run, "schedule"), False, "DESCRIBE")
        yield from _transactions(run, role, "source")
    elif role == "trainer":
        yield Grant(role, "group", consumer_group(run, "trainer."), True, "READ")
        yield from _transactions(run, role, "trainer")
    elif role in (LAUNCHER, LOOKER):
        yield Grant(role, "topic", topic_name(run, ""), True, "READ")
        yield Grant(role, "topic", topic_name(run, ""), True, "DESCRIBE_CONFIGS")
        yield Grant(role, "group", consumer_group(run, ""), True, "DESCRIBE")
    if role == LAUNCHER:
        yield Grant(role, "topic", topic_name(run, ""), True, "CREATE")
        yield Grant(role, "topic", topic_name(run, ""), True, "DELETE")
        yield Grant(role, "group", consumer_group(run, ""), True, "DELETE")


def _on_topic(run: str, role: str, spec: TopicSpec) -> Iterator[Grant]:
    stages = set(ROLES[role])
    name = topic_name(run, f"{spec.name}." if spec.per_policy else spec.name)
    if stages & set(spec.writers):
        yield Grant(role, "topic", name, spec.per_policy, "WRITE")
    inputs = {topic for topics in SUB_TOPOLOGIES.values() for topic in topics} if role == "operators" else set()
    more = () if role in (LAUNCHER, LOOKER) else (*_EVERYONE_READS, *_LOOKS_BACK.get(role, ()))  # these read all anyway
    if stages & set(spec.readers) or spec.name in inputs or spec.name in more:
        yield Grant(role, "topic", name, spec.per_policy, "READ")


def _transactions(run: str, role: str, owner: str) -> Iterator[Grant]:
    yield Grant(role, "transactional_id", transactional_id(run, owner, ""), True, "WRITE")
    yield Grant(role, "transactional_id", transactional_id(run, owner, ""), True, "DESCRIBE")
