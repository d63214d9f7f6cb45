"""THE MAP: every topic of a run, what it carries, who writes it and who reads it (protocol 2).

Partition counts are fixed when the run is created and stored in its RunManifest. Writers and readers are named by their
stage files; ``tests/architecture`` checks that the chain from prompts to weights has no gap.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.schemas.ids import changelog_topic

__all__ = (
    "CHANGELOG_SETTINGS",
    "STORES",
    "SUB_TOPOLOGIES",
    "TOPICS",
    "TopicSpec",
    "partition_counts",
    "settings_of",
    "spec_of",
)

RUN_SETTINGS: Mapping[str, str] = {
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.bytes": str(64 << 20),
    "max.message.bytes": str(8 << 20),
}
"""Settings of every run topic: unlimited retention (a janitor deletes), 64 MB segments, records up to 8 MB."""

CHANGELOG_SETTINGS: Mapping[str, str] = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 << 20),
    "segment.ms": "60000",
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "60000",
    "delete.retention.ms": "60000",
    "max.message.bytes": str(8 << 20),
}
"""Settings of changelogs and compacted topics (protocol 7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """One row of the map. ``partitions`` is 'one', 'groups' (N), 'inboxes' (I), 'policies' or 'lanes' (L)."""

    name: str
    partitions: str
    by: str
    records: tuple[str, ...]
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    compacted: bool = False
    per_policy: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)


TOPICS: tuple[TopicSpec, ...] = (
    TopicSpec(
        name="run", partitions="one", by="-", records=("RunManifest", "RunEnd", "Taken"), compacted=True,
        writers=("flow", "prompt_to_task"),
        readers=("dataset_to_prompt", "task_to_trajectory", "batch_to_step", "verify"),
    ),
    TopicSpec(
        name="prompts", partitions="one", by="-", records=("Prompt", "End"),
        writers=("dataset_to_prompt",), readers=("prompt_to_task", "report"),
    ),
    TopicSpec(
        name="demand", partitions="one", by="-", records=("Demand",),
        writers=("task_to_trajectory",), readers=("prompt_to_task", "report"),
    ),
    TopicSpec(
        name="tasks", partitions="inboxes", by="crc32(worker) mod I",
        records=("Task", "Cancel", "Suspend", "Resume", "Stop"),
        writers=("prompt_to_task",), readers=("task_to_trajectory",),
    ),
    TopicSpec(
        name="admissions", partitions="groups", by="group", records=("Admission", "Failed", "Stop"),
        writers=("prompt_to_task",), readers=("trajectory_to_group",),
    ),
    TopicSpec(
        name="trajectories", partitions="groups", by="group", records=("Trajectory", "Score"),
        writers=("task_to_trajectory",), readers=("trajectory_to_group",),
    ),
    TopicSpec(
        name="groups", partitions="policies", by="policy", records=("Member", "Group"),
        writers=("trajectory_to_group",), readers=("group_to_batch",),
    ),
    TopicSpec(
        name="ledger", partitions="policies", by="policy",
        records=("Opened", "Skipped", "Kept", "NeedsScore", "Closed", "Batched", "Trained", "End"),
        writers=("prompt_to_task", "trajectory_to_group", "group_to_batch"),
        readers=("prompt_to_task", "group_to_batch", "report", "verify"),
    ),
    TopicSpec(
        name="batches", partitions="lanes", by="lane", records=("Item",), per_policy=True,
        writers=("group_to_batch",), readers=("batch_to_step",),
    ),
    TopicSpec(
        name="manifests", partitions="policies", by="policy", records=("Manifest", "End"),
        writers=("group_to_batch",), readers=("batch_to_step", "report", "verify"),
    ),
    TopicSpec(
        name="steps", partitions="policies", by="policy", records=("Step", "Rollback", "Resumed", "Stop"),
        writers=("batch_to_step",), readers=("prompt_to_task", "group_to_batch", "report", "verify"),
    ),
    TopicSpec(
        name="deltas", partitions="policies", by="policy", records=("Head",), compacted=True,
        writers=("step_to_delta",), readers=("delta_to_worker",),
    ),
    TopicSpec(
        name="partials", partitions="groups", by="group", records=("Partial",),
        writers=("task_to_trajectory",), readers=("task_to_trajectory",),
    ),
    TopicSpec(
        name="evals", partitions="one", by="-", records=("EvalResult",),
        writers=("task_to_trajectory",), readers=("report", "delta_upkeep"),
    ),
    TopicSpec(
        name="dead-letters", partitions="one", by="-", records=(),
        writers=("dataset_to_prompt", "prompt_to_task", "task_to_trajectory", "trajectory_to_group", "group_to_batch"),
        readers=("report",),
    ),
)  # fmt: skip
"""Every topic of a run, in the order of the data's way; changelogs are in STORES."""

SUB_TOPOLOGIES: Mapping[str, tuple[str, ...]] = {
    "schedule": ("prompts", "demand", "ledger", "steps"),
    "assemble": ("trajectories", "admissions"),
    "batch": ("groups", "ledger", "steps"),
}
"""Input topics of each sub-topology; ``schedule`` has one task, the others one per partition."""

STORES: Mapping[str, tuple[str, ...]] = {
    "schedule": ("state",),
    "assemble": ("state",),
    "batch": ("state",),
}
"""Stores of each sub-topology; each has a changelog with one partition per task."""


def spec_of(topic: str) -> TopicSpec:
    """The row of a topic without the run's prefix (``batches.<policy>`` gives the row ``batches``). Raises KeyError."""
    name = topic.split(".", 1)[0]
    for spec in TOPICS:
        if spec.name == name:
            return spec
    raise KeyError(topic)


def settings_of(topic: str) -> dict[str, str]:
    """The topic settings of a run topic or changelog."""
    if topic.endswith("-changelog"):
        return dict(CHANGELOG_SETTINGS)
    spec = spec_of(topic)
    return {**(CHANGELOG_SETTINGS if spec.compacted else RUN_SETTINGS), **spec.settings}


def partition_counts(policies: Sequence[str], *, groups: int, inboxes: int, lanes: int) -> dict[str, int]:
    """Partition count of every topic of a run, changelogs included, by name without the run's prefix."""
    counts = {"one": 1, "groups": groups, "inboxes": inboxes, "policies": len(policies), "lanes": lanes}
    out: dict[str, int] = {}
    for spec in TOPICS:
        names: Iterable[str] = [f"{spec.name}.{p}" for p in policies] if spec.per_policy else [spec.name]
        out.update(dict.fromkeys(names, counts[spec.partitions]))
    tasks = {"schedule": 1, "assemble": groups, "batch": len(policies)}
    for sub, stores in STORES.items():
        out.update({changelog_topic(sub, store): tasks[sub] for store in stores})
    return out
