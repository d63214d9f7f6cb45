"""What a rollout worker does when broker, store, weights or results go wrong: it says so and goes on."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_rig import Rig

from headrace.connectors.blobs import BlobCorrupt, get_sequences
from headrace.connectors.stores.store import ObjectStore
from headrace.pipeline.rollout.delivery import Delivery
from headrace.schemas import parts
from headrace.schemas.records import Trajectory

pytestmark = pytest.mark.timeout(240)
NUMBERS = itertools.count(5000)
LARGE = 3_200_000
"""Tokens of a trajectory whose arrays take 40 MB."""


class LocalBroker:
    """A local broker process of a test's own, to be killed and started again on its port."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace.connectors.broker", "--data", str(self.data), "--port", str(self.port)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        ready = next(line for line in self.process.stdout if line.startswith("ready "))
        self.port = int(ready.split()[1])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    made = LocalBroker(tmp_path / "broker")
    yield made
    made.kill()


@pytest.fixture
def rig_on(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Rig]]:
    """Makes a rig on a broker; its worker is ended."""
    rigs: list[Rig] = []

    def make(address: str, **rollout: Any) -> Rig:
        rigs.append(Rig(address, tmp_path / "rig", tiny_model, next(NUMBERS), **rollout))
        return rigs[-1]

    yield make
    for rig in rigs:
        if rig.worker is not None and rig.worker.poll() is None:
            rig.worker.kill()
            rig.worker.wait(10)
        rig.reader.close()


def test_a_broker_killed_and_started_again_costs_no_result(broker: LocalBroker, rig_on: Callable[..., Rig]) -> None:
    rig = rig_on(f"127.0.0.1:{broker.port}", options={"step_seconds": 0.1, "mean_length": 8, "sigma": 0})
    rig.begin()
    demand = rig.demand()
    for group in range(6):
        rig.to_worker(rig.task(demand, group))
    rig.demand(lambda d: len(d.held) == 6)
    broker.kill()
    time.sleep(4)
    broker.start()
    for group in range(6):
        assert rig.trajectory(group).status == "train"
    after = rig.demand(lambda d: not d.held and d.next_sequence == 6)
    assert after.incarnation == demand.incarnation
    rig.to_worker(rig.task(demand, 7))
    assert rig.trajectory(7).status == "train"
    assert len(rig.decoded("trajectories")) == 7
    assert rig.end() == 0


def test_weights_that_do_not_verify_leave_the_worker_on_its_version(
    bootstrap: str, rig_on: Callable[..., Rig]
) -> None:
    rig = rig_on(bootstrap)
    rig.begin()
    demand = rig.demand()
    original = rig.store.put

    def damaged(key: str, data: Any, *, create_only: bool = False) -> None:
        broken = bytearray(data)
        if "manifest" not in key:
            broken[len(broken) // 2] ^= 0xFF
        original(key, bytes(broken), create_only=create_only)

    rig.store.put = damaged  # type: ignore[method-assign]
    rig.publish(1)
    rig.store.put = original  # type: ignore[method-assign]
    rig.until(lambda: "policy main stays at version 0" in rig.log.read_text())
    rig.to_worker(rig.task(demand, 1))
    rig.to_worker(rig.task(demand, 2, min_version=1))
    assert set(rig.trajectory(1).sequences[0].versions.tolist()) == {-1, 0}
    assert rig.demand().policies[0].version == 0
    rig.publish(2, whole=True)
    rig.demand(lambda d: d.policies[0].version == 2)
    assert rig.trajectory(2).oldest_versions == {"0": 2}


def _large(tokens: int, text: str = "") -> Trajectory:
    mask = np.ones(tokens, np.uint8)
    mask[0] = 0
    versions = np.full(tokens, 3, np.int32)
    versions[0] = -1
    sequence = parts.Sequence(
        policy=0, role="policy", prompt_length=1, end_reason="stop", oldest_version=3, newest_version=3,
        tokens=np.arange(tokens, dtype=np.int32), logprobs=np.zeros(tokens, np.float32), mask=mask, versions=versions,
    )  # fmt: skip
    return Trajectory(
        group=5, replica=1, attempt=0, worker="rollout-0", incarnation=1, stream="main", prompt_id="p", status="train",
        end_reason="stop", reward=1.0, tokens=tokens - 1, started_ms=1, finished_ms=2, completion_text=text,
        oldest_versions={"0": 3}, sequences=[sequence],
    )  # fmt: skip


def _deliver(rig: Rig, store: ObjectStore | None, trajectory: Trajectory) -> None:
    delivery = Delivery(rig.connection, "rig", partitions=2, store=store, offload_bytes=1 << 20, retries=1)

    async def play() -> None:
        waiting = asyncio.create_task(delivery.trajectory(trajectory))
        while not waiting.done():
            delivery.poll(0.01)
            await asyncio.sleep(0)
        await waiting

    asyncio.run(play())
    assert delivery.close(10) == 0


def test_a_40_megabyte_trajectory_is_offloaded_or_named(bootstrap: str, rig_on: Callable[..., Rig]) -> None:
    rig = rig_on(bootstrap)
    _deliver(rig, rig.store, _large(LARGE, text="x" * 200_000))
    one = rig.trajectory(5, 1)
    assert (one.status, one.tokens, one.sequences) == ("train", LARGE - 1, [])
    assert one.completion_text.endswith("more]")
    assert one.blob is not None
    assert one.blob.size > 40_000_000
    (sequence,) = get_sequences(rig.store, one.blob)
    assert sequence.tokens[-1] == LARGE - 1
    rig.store.put(one.blob.key, rig.store.get(one.blob.key)[:-1] + b"x")
    with pytest.raises(BlobCorrupt, match="overwritten or damaged"):
        get_sequences(rig.store, one.blob)

    rig.seen.clear()
    _deliver(rig, None, _large(LARGE))
    lost = rig.trajectory(5, 1)
    assert (lost.status, lost.sequences, lost.blob) == ("excluded", [], None)
    assert "no object store can take them" in lost.error
    (letter,) = rig.until(lambda: rig.records("dead-letters"))
    headers = dict(letter.headers)
    assert len(letter.value or b"") == 64 << 10
    assert int(headers["hr-size"] or 0) > 40_000_000
    assert headers["hr-sha256"]


def test_a_lone_surrogate_in_text_is_a_dead_letter_and_an_excluded_trajectory(
    bootstrap: str, rig_on: Callable[..., Rig]
) -> None:
    rig = rig_on(bootstrap)
    _deliver(rig, rig.store, _large(10, text="bad \ud800 text"))
    one = rig.trajectory(5, 1)
    assert (one.status, one.completion_text) == ("excluded", "")
    assert "lone surrogate" in one.error
    (letter,) = rig.until(lambda: rig.records("dead-letters"))
    assert b"\\ud800" in (letter.value or b"")
