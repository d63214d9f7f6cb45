"""The stages of a run over long absences, on the local broker and on Apache Kafka: no finished work is thrown away."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fault_kit import LONG
from stage_feed import make_admission, make_trajectory
from toy_worker import running, send

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.pipeline.flow import STAGES
from headrace.pipeline.runtime.worker import Worker, wall_ms
from headrace.schemas.config import RunConfig
from headrace.schemas.records import Closed, Group, Kept
from headrace.schemas.topics import partition_counts


def assemble_run(bootstrap: str) -> tuple[RunConfig, Connection]:
    config = RunConfig.model_validate(
        {
            "run": {"id": f"late-{uuid.uuid4().hex[:8]}", "group_partitions": 1, "inboxes": 1, "lanes": 1},
            "policies": {"main": {"model": "none"}},
            "streams": {"main": {"dataset": "none", "group_size": 2}},
        }
    )
    connection = Connection.of(config.kafka, config.run.id, bootstrap)
    connection.ensure_topics(partition_counts(["main"], groups=1, inboxes=1, lanes=1))
    return config, connection


@contextmanager
def assembling(connection: Connection, config: RunConfig) -> Iterator[None]:
    stop = StopSignal()
    worker = Worker(connection, config, "assemble", "a", STAGES["assemble"], stop=stop)
    with running(worker, stop) as errors:
        yield
    assert not errors


def ledger(connection: Connection, count: int) -> list[Any]:
    """The ledger once it has `count` endings or a while has passed."""
    end = time.monotonic() + 30
    while True:
        found = [r for raw in connection.read_topic("ledger") if isinstance(r := raw.decoded(), Kept | Closed)]
        if len(found) >= count or time.monotonic() > end:
            return found
        time.sleep(0.1)


def test_operators_down_longer_than_the_group_deadline_throw_no_finished_trajectory_away(bootstrap: str) -> None:
    """Group 0 has reported by half, group 1 not at all when the operators go; all was finished before the deadline."""
    config, connection = assemble_run(bootstrap)
    down = 20.0 if LONG else 3.5
    deadline = wall_ms() + 1500
    with assembling(connection, config):
        records = [make_admission(group, admitted_ms=wall_ms(), deadline_ms=deadline) for group in (0, 1, 2)]
        send(connection, "admissions", [(0, record) for record in records])
        send(connection, "trajectories", [(0, make_trajectory(0, 0, 1.0))])
        time.sleep(0.3)
    rest = [make_trajectory(0, 1), make_trajectory(1, 0, 1.0), make_trajectory(1, 1)]
    send(connection, "trajectories", [(0, record) for record in rest])
    time.sleep(down)
    assert wall_ms() > deadline + 2000, "down until the timers were long due"
    with assembling(connection, config):
        ended = ledger(connection, 3)
    assert {r.group for r in ended if isinstance(r, Kept)} == {0, 1}
    assert [(r.group, r.reason) for r in ended if isinstance(r, Closed)] == [(2, "failed")], "that one had no result"
    groups = [r for raw in connection.read_topic("groups") if isinstance(r := raw.decoded(), Group)]
    assert all(group.members == 2 and not group.short for group in groups)
