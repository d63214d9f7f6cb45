"""What the data plane benchmark is fed with: runs with topics of their own, trajectories of 36 KB, their admissions.

In: a connection to a broker; out: topics filled before anything is timed. Groups come interleaved, as from a fleet.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from headrace.connectors.kafka import Connection
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import RunConfig
from headrace.schemas.ids import group_partition
from headrace.schemas.parts import AdmittedPolicy, Reward, Sequence, Source
from headrace.schemas.records import Admission, Opened, Record, Trajectory
from headrace.schemas.topics import partition_counts

GROUP = 8
TOKENS = 2770
"""Tokens of a trajectory whose record has 36 KB: 13 bytes each (id, log-prob, version, mask) and the fields."""
PARTITIONS = 4
INTERLEAVED = 16
FAR_MS = 10**13
PROMPT_SHARE = 0.1


@contextmanager
def new_run(bootstrap: str, **sections: Any) -> Iterator[tuple[RunConfig, Connection]]:
    """A run with its topics, deleted afterwards."""
    config = RunConfig.model_validate(
        {
            "run": {
                "id": f"dataplane-{uuid.uuid4().hex[:8]}",
                "group_partitions": PARTITIONS,
                "inboxes": 4,
                "lanes": 1,
            },
            "policies": {"main": {"model": "none"}},
            "streams": {"main": {"dataset": "none", "group_size": GROUP}},
            **sections,
        }
    )
    connection = Connection.of(config.kafka, config.run.id, bootstrap)
    connection.wait_for_broker(60)
    connection.ensure_topics(partition_counts(["main"], groups=PARTITIONS, inboxes=4, lanes=1))
    try:
        yield config, connection
    finally:
        connection.delete_run_topics()


def make_sequence(tokens: int, seed: int) -> Sequence:
    """Random tokens after a prompt, all of one version."""
    rng = np.random.default_rng(seed)
    prompt = int(tokens * PROMPT_SHARE)
    mask = np.ones(tokens, "uint8")
    mask[:prompt] = 0
    logprobs = rng.normal(-1, 0.5, tokens).astype("float32")
    logprobs[:prompt] = 0
    versions = np.where(mask, 0, -1).astype("int32")
    return Sequence(
        policy=0, role="policy", prompt_length=prompt, end_reason="stop", oldest_version=0, newest_version=0,
        tokens=rng.integers(0, 150_000, tokens).astype("int32"), logprobs=logprobs, mask=mask, versions=versions,
    )  # fmt: skip


def make_trajectory(group: int, replica: int, sequence: Sequence) -> Trajectory:
    """A result with a reward that differs within its group."""
    return Trajectory(
        group=group, replica=replica, attempt=0, worker="rollout-0", incarnation=1, stream="main",
        prompt_id=f"{group:016x}", status="train", end_reason="stop", reward=float(replica % 2),
        tokens=int(sequence.mask.sum()), started_ms=0, finished_ms=1,
        rewards=[Reward(name="exact_match", value=float(replica % 2))], oldest_versions={"main": 0},
        sources=[Source(topic="tasks", partition=0, offset=group)], sequences=[sequence],
    )  # fmt: skip


def make_admission(group: int, watermark: int = -1) -> Admission:
    """A group of one policy that nothing times out."""
    return Admission(
        group=group, prompt_id=f"{group:016x}", stream="main", group_size=GROUP, extra_replicas=0, admitted_ms=0,
        deadline_ms=FAR_MS, watermark=watermark, policies=[AdmittedPolicy(policy=0, min_version=0, cap=1 << 30)],
    )  # fmt: skip


def make_opened(group: int) -> Opened:
    """The credit of an admission."""
    return Opened(policy=0, group=group, stream="main", prompt_id=f"{group:016x}", min_version=0, cap=1 << 30)


class Feed:
    """Writes records of a run, without transactions; `flush` waits until they are acknowledged."""

    def __init__(self, connection: Connection, **settings: Any) -> None:
        self._connection = connection
        self._producer = connection.producer("feed", **settings)
        self._samples = [make_sequence(TOKENS, seed) for seed in range(GROUP)]
        self._headers: dict[type, Any] = {}

    def put(self, topic: str, record: Record, partition: int) -> None:
        """Write one record."""
        headers = self._headers.setdefault(type(record), headers_of(record, self._connection.run, "0"))
        key = str(getattr(record, "group", 0)).encode()
        self._connection.produce(
            self._producer, topic, encode(record), partition=partition, key=key, headers=[*headers]
        )

    def admit(self, groups: range, watermark: int = -1) -> None:
        """Admissions of these groups."""
        for group in groups:
            self.put("admissions", make_admission(group, watermark), group_partition(group, PARTITIONS))

    def trajectories(self, groups: range) -> int:
        """All trajectories of these groups, `INTERLEAVED` groups at a time; returns how many."""
        for first in range(groups.start, groups.stop, INTERLEAVED):
            some = range(first, min(first + INTERLEAVED, groups.stop))
            for replica in range(GROUP):
                for group in some:
                    record = make_trajectory(group, replica, self._samples[replica])
                    self.put("trajectories", record, group_partition(group, PARTITIONS))
            self._producer.poll(0)
        return len(groups) * GROUP

    def flush(self) -> None:
        """Wait for all acknowledgements. Raises RuntimeError when some do not come."""
        if self._producer.flush(120):
            raise RuntimeError("the feed is not acknowledged within 120 s")
