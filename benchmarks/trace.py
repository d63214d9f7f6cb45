"""How long does `headrace trace` take on a run of 100,000 trajectories?

Writes the topics of such a run to a local broker (12,500 groups of 8 at 500 trajectories a second by their times, with
admissions, tasks, ledger, manifests, steps and demand), ends the broker, and runs the command as a person would on
prompts of the first, middle and last groups: it starts the broker again, follows the prompt and prints. `--quick`
writes a tenth.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.form import Figure, main
from headrace.connectors.kafka import Connection, Producer
from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.launch.local_broker import start_broker
from headrace.pipeline.launch.supervisor import Supervisor
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import RunConfig, dump_config, load_config
from headrace.schemas.ids import group_partition
from headrace.schemas.parts import AdmittedPolicy, HostedPolicy, ManifestMember, Sequence
from headrace.schemas.records import (
    Admission,
    Batched,
    Demand,
    Kept,
    Manifest,
    Opened,
    Prompt,
    Record,
    Step,
    Task,
    Trajectory,
)  # fmt: skip
from headrace.schemas.topics import partition_counts

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "sort_digits" / "run.toml"
GROUP_SIZE, GROUPS_OF_A_BATCH, TOKENS = 8, 32, 256
FIRST_MS, MS_OF_A_GROUP, LIFE_MS = 1_764_478_800_000, 16, 2_000
RUNS = 5


class Story:
    """Writes the records of a run whose times are made up."""

    def __init__(self, connection: Connection, config: RunConfig) -> None:
        self._connection, self._config = connection, config
        self._producer: Producer = connection.producer("story")
        self._run = config.run.id

    def write(self, topic: str, record: Record, at_ms: int, partition: int = 0, key: bytes | None = None) -> None:
        """One record, with its time."""
        self._connection.produce(
            self._producer, topic, encode(record), partition=partition, key=key, timestamp=at_ms,
            headers=headers_of(record, self._run, "0"),
        )  # fmt: skip

    def group(self, group: int) -> None:
        """From the prompt to the ledger."""
        at, prompt_id = FIRST_MS + group * MS_OF_A_GROUP, f"p{group:08d}"
        partitions = self._config.run.group_partitions
        place = group_partition(group, partitions)
        prompt = Prompt(
            prompt_id=prompt_id, stream="main", dataset="made.jsonl", row=group, epoch=0, position=group, prompt="21="
        )
        self.write("prompts", prompt, FIRST_MS)
        policy = AdmittedPolicy(policy=0, min_version=0, cap=64)
        admission = Admission(
            group=group, prompt_id=prompt_id, stream="main", group_size=GROUP_SIZE, extra_replicas=0, admitted_ms=at,
            deadline_ms=at + 60_000, watermark=-1, policies=[policy],
        )  # fmt: skip
        self.write("admissions", admission, at, place)
        opened = Opened(policy=0, group=group, stream="main", prompt_id=prompt_id, min_version=0, cap=64)
        self.write("ledger", opened, at)
        for replica in range(GROUP_SIZE):
            ids = {"group": group, "replica": replica, "attempt": 0, "stream": "main", "worker": "rollout-0"}
            task = Task(
                kind="train", **ids, incarnation=1, sequence=0, issued_ms=at, deadline_ms=at + 60_000, prompt=prompt
            )
            self.write("tasks", task, at, 7, b"rollout-0")
            done = at + LIFE_MS // 2 + 97 * replica
            self.write(
                "trajectories", self.trajectory(ids, prompt_id, done), done, place, f"{group}/{replica}".encode()
            )
        self.write("ledger", Kept(policy=0, group=group, raw_mean=0.5), at + LIFE_MS)

    def trajectory(self, ids: dict[str, object], prompt_id: str, done: int) -> Trajectory:
        """One of 256 tokens."""
        sequence = Sequence(
            policy=0, role="policy", prompt_length=4, end_reason="stop", oldest_version=0, newest_version=0,
            tokens=np.arange(TOKENS, dtype=np.int32), logprobs=np.zeros(TOKENS, np.float32),
            mask=np.ones(TOKENS, np.uint8), versions=np.zeros(TOKENS, np.int32),
        )  # fmt: skip
        return Trajectory(
            **ids, incarnation=1, prompt_id=prompt_id, status="train", end_reason="stop", reward=1.0, tokens=TOKENS,
            started_ms=done - 50, finished_ms=done, prompt_text="21=", completion_text="12", sequences=[sequence],
        )  # type: ignore[arg-type]  # fmt: skip

    def batch(self, batch: int) -> None:
        """From the ledger to the worker that loads the version."""
        groups = list(range((batch - 1) * GROUPS_OF_A_BATCH, batch * GROUPS_OF_A_BATCH))
        at = FIRST_MS + groups[-1] * MS_OF_A_GROUP + LIFE_MS + 50
        self.write("ledger", Batched(policy=0, batch=batch, groups=groups), at)
        members = [
            ManifestMember(group=g, replica=r, use=0, lane=0, oldest_version=0)
            for g in groups
            for r in range(GROUP_SIZE)
        ]
        manifest = Manifest(
            policy=0, batch=batch, start_version=batch - 1, since_version=0, fresh_groups=len(groups),
            replayed_groups=0, tokens=1, sequences=len(members), trajectories=len(members), groups=len(groups),
            composed_ms=at, members=members,
        )  # fmt: skip
        self.write("manifests", manifest, at, key=str(batch).encode())
        step = Step(
            policy=0, batch=batch, version=batch, lineage=0, updates=1, loss=0.1, tokens=1, sequences=1,
            wait_seconds=0.1, step_seconds=0.2, publish_seconds=0.1, delta_bytes=9, changed_share=0.1,
            finished_ms=at + 300,
        )  # fmt: skip
        self.write("steps", step, at + 300)
        for late, version in ((200, batch - 1), (500, batch)):
            demand = Demand(
                worker="rollout-0", incarnation=1, role="any", capacity=64, next_sequence=0, inbox=7, sent_ms=at + late,
                policies=[HostedPolicy(policy=0, version=version)],
            )  # fmt: skip
            self.write("demand", demand, at + late)

    def end(self) -> None:
        """Everything is in the topics."""
        if self._producer.flush(120):
            raise SystemExit("the local broker did not take the records within 120 s")


def make_run(parent: Path, groups: int) -> RunFolder:
    """A finished run's folder."""
    config = load_config([RECIPE], [f"run.folder={parent}", "run.id=told"])
    folder = RunFolder.of(config)
    for path in (folder.path, folder.logs, folder.broker):
        path.mkdir(parents=True, exist_ok=True)
    dump_config(config, folder.config)
    supervisor = Supervisor(folder.logs, max_restarts=1, window_seconds=60)
    try:
        connection = Connection.of(config.kafka, config.run.id, start_broker(supervisor, folder.broker))
        run = config.run
        connection.ensure_topics(
            partition_counts(config.policy_names(), groups=run.group_partitions, inboxes=run.inboxes, lanes=run.lanes)
        )
        story = Story(connection, config)
        for group in range(groups):
            story.group(group)
            if (group + 1) % GROUPS_OF_A_BATCH == 0:
                story.batch((group + 1) // GROUPS_OF_A_BATCH)
        story.end()
    finally:
        supervisor.stop(supervisor.all_names(), grace_seconds=20)
    return folder


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """Write, then ask."""
    groups = 1_248 if given.quick else 12_512
    with tempfile.TemporaryDirectory() as parent:
        folder = make_run(Path(parent), groups)
        took, events = [], 0
        for at in range(RUNS):
            prompt = f"p{at * (groups - 1) // (RUNS - 1):08d}"
            began = time.perf_counter()
            command = [str(Path(sys.executable).with_name("headrace")), "trace", prompt, "--folder", str(folder.path)]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            took.append(time.perf_counter() - began)
            events = len(told.splitlines())
            if events != 2 + 1 + 2 * GROUP_SIZE + 4 + 1:
                raise SystemExit(f"trace of {prompt} told {events} events:\n{told}")
    yield Figure("trajectories", groups * GROUP_SIZE)
    yield Figure("events", events)
    yield Figure("trace_seconds", statistics.median(took), "s", target=2.0, at_least=False, anchor="whole command")
    yield Figure("trace_seconds_worst", max(took), "s", anchor=f"of {RUNS} prompts from the first to the last group")


if __name__ == "__main__":
    main(__doc__, measure)
