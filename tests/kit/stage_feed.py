"""Records for tests of the stages, short to write: what matters is an argument, the rest has a harmless value."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from headrace.pipeline import flow
from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.schemas.config import RunConfig
from headrace.schemas.ids import group_partition, inbox_of
from headrace.schemas.parts import AdmittedPolicy, HeldTask, HostedPolicy, Sequence
from headrace.schemas.records import (
    Admission,
    Demand,
    Group,
    Member,
    Opened,
    Prompt,
    Record,
    Step,
    Task,
    Trajectory,
)


def make_config(
    *,
    policies: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    operators: Many[dict[str, Any]] = (),
    rollout: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
    parts: int = 1,
    **stream: Any,
) -> RunConfig:
    """A run with the stream ``main``; by default one policy ``main`` with batches of two groups of two."""
    return RunConfig.model_validate(
        {
            "run": {"id": "test", "group_partitions": parts, "inboxes": 2, "lanes": 2},
            "trainer": {"batch_groups": 2, **(trainer or {})},
            "rollout": rollout or {},
            "eval": evaluation or {},
            "policies": policies or {"main": {"model": "none"}},
            "streams": {"main": {"dataset": "none", "group_size": 2, **stream}},
            "operators": list(operators),
        }
    )


def make_driver(config: RunConfig, *names: str) -> TopologyDriver:
    """A driver with only the named sub-topologies."""
    return TopologyDriver(config, {name: flow.STAGES[name] for name in names})


def make_prompt(number: int, stream: str = "main") -> Prompt:
    """The n-th prompt of a stream."""
    return Prompt(
        prompt_id=f"{stream}-{number}", stream=stream, dataset="none", row=number, epoch=0, position=number, prompt="?"
    )


def make_demand(
    worker: str = "w0",
    *,
    incarnation: int = 1,
    capacity: int = 4,
    read: int = 0,
    held: Many[Task] = (),
    versions: dict[int, int] | None = None,
    role: str = "any",
    partials: dict[tuple[int, int], int] | None = None,
) -> Demand:
    """A worker's snapshot; ``held`` are Tasks it holds, ``partials`` offsets by (group, replica)."""
    offsets = partials or {}
    return Demand(
        worker=worker,
        incarnation=incarnation,
        role=role,
        capacity=capacity,
        next_sequence=read,
        inbox=0,
        sent_ms=0,
        policies=[HostedPolicy(policy=p, version=v) for p, v in (versions or {0: 0}).items()],
        held=[
            HeldTask(
                kind=t.kind,
                group=t.group,
                replica=t.replica,
                attempt=t.attempt,
                partial=offsets.get((t.group, t.replica), -1),
            )
            for t in held
        ],
    )


def make_sequence(policy: int = 0, oldest: int = 0, newest: int | None = None, tokens: int = 2) -> Sequence:
    """One prompt token and ``tokens`` trained ones, the first by ``oldest``, the others by ``newest``."""
    newest = oldest if newest is None else newest
    versions = [-1, oldest, *[newest] * (tokens - 1)]
    return Sequence(
        policy=policy,
        role="policy",
        prompt_length=1,
        end_reason="stop",
        oldest_version=oldest,
        newest_version=newest,
        tokens=np.arange(tokens + 1, dtype="int32"),
        logprobs=np.zeros(tokens + 1, "float32"),
        mask=np.array([0, *[1] * tokens], "uint8"),
        versions=np.array(versions[: tokens + 1], "int32"),
    )


def make_trajectory(group: int, replica: int, reward: float = 0.0, *, usable: bool = True, **more: Any) -> Trajectory:
    """A result; excluded ones have an error and no sequences."""
    fields: dict[str, Any] = {
        "attempt": 0,
        "worker": "w0",
        "incarnation": 1,
        "stream": "main",
        "prompt_id": "main-0",
        "status": "train" if usable else "excluded",
        "end_reason": "stop" if usable else "env_error",
        "reward": reward,
        "tokens": 2,
        "started_ms": 0,
        "finished_ms": 1,
        "error": "" if usable else "it failed",
        "sequences": [make_sequence()] if usable else [],
    }
    return Trajectory(group=group, replica=replica, **{**fields, **more})


def make_admission(group: int, *, deadline_ms: int = 2_000_000, watermark: int = -1, **more: Any) -> Admission:
    """A group of two for policy 0."""
    fields: dict[str, Any] = {
        "prompt_id": f"main-{group}",
        "stream": "main",
        "group_size": 2,
        "extra_replicas": 0,
        "admitted_ms": 0,
        "policies": [AdmittedPolicy(policy=0, min_version=0, cap=4)],
    }
    return Admission(group=group, deadline_ms=deadline_ms, watermark=watermark, **{**fields, **more})


def make_opened(group: int, min_version: int = 0, policy: int = 0) -> Opened:
    """A credit opens."""
    return Opened(policy=policy, group=group, stream="main", prompt_id=f"main-{group}", min_version=min_version, cap=4)


def make_members(group: int, oldest: int = 0, tokens: Many[int] = (2, 2)) -> list[Record]:
    """The Members of a group and its Group record, as ``assemble`` writes them."""
    members: list[Record] = [
        Member(
            policy=0,
            group=group,
            replica=replica,
            attempt=0,
            stream="main",
            prompt_id=f"main-{group}",
            status="train",
            raw_reward=float(replica),
            shaped_reward=float(replica),
            length=count,
            oldest_version=oldest,
            newest_version=oldest,
            end_reason="stop",
            sequences=[make_sequence(oldest=oldest, tokens=count)],
        )
        for replica, count in enumerate(tokens)
    ]
    closed = Group(
        policy=0,
        group=group,
        stream="main",
        prompt_id=f"main-{group}",
        members=len(tokens),
        counted=len(tokens),
        trained=len(tokens),
        short=False,
        reward_mean=0.5,
        reward_std=0.7,
        raw_mean=0.5,
        raw_std=0.7,
        oldest_version=oldest,
        newest_version=oldest,
        tokens=sum(tokens),
        closed_ms=0,
    )
    return [*members, closed]


def make_step(batch: int, version: int | None = None, policy: int = 0) -> Step:
    """Batch ``batch`` became ``version`` (by default the same number)."""
    return Step(
        policy=policy,
        batch=batch,
        version=batch if version is None else version,
        lineage=0,
        updates=1,
        loss=0.0,
        tokens=0,
        sequences=0,
        wait_seconds=0.0,
        step_seconds=0.0,
        publish_seconds=0.0,
        delta_bytes=0,
        changed_share=0.0,
        finished_ms=0,
    )


def of_type(driver: TopologyDriver, topic: str, kind: type[Any], partition: int | None = None) -> list[Any]:
    """The records of one kind in a topic."""
    return [record for record in driver.records(topic, partition) if isinstance(record, kind)]


def group_place(config: RunConfig, group: int) -> int:
    """The partition of a group."""
    return group_partition(group, config.run.group_partitions)


def inbox(config: RunConfig, worker: str) -> int:
    """The inbox of a worker."""
    return inbox_of(worker, config.run.inboxes)
