"""Rollout workers join and leave under load, from one to four and back: every group whole, none twice, nobody pauses.

Source, schedule, assemble and batch are the real ones; a scripted engine samples, and nobody trains, so that the run
comes to rest when the credits are used up.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rollout_rig import Rig

from headrace.connectors.lifetime import StopSignal
from headrace.pipeline.dataset_to_prompt import Source
from headrace.pipeline.run_records import read_records
from headrace.pipeline.runtime.__main__ import run_stages
from headrace.schemas.config import RunConfig, dump_config
from headrace.schemas.records import Closed, Kept, Opened, Trajectory

pytestmark = pytest.mark.timeout(300)

GROUPS, SIZE = 300, 2


class Fleet:
    """Rollout workers as processes."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._config = rig.folder / "config.json"
        dump_config(rig.config, self._config)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: list[int] = []

    def join(self, name: str) -> None:
        command = ["-m", "headrace.pipeline.task_to_trajectory", "--config", str(self._config), "--instance", name]
        with (self._rig.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip

    def leave(self, name: str) -> int:
        process = self.running.pop(name)
        process.terminate()
        return process.wait(60)

    def kill(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


@contextmanager
def operators(rig: Rig, source: Source, stop: StopSignal) -> Iterator[list[BaseException]]:
    """Source and the three stages, each in a thread."""
    errors: list[BaseException] = []

    def guarded(call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(source.run,)),
        threading.Thread(
            target=guarded,
            args=(run_stages, rig.config, rig.connection, "ops", ["schedule", "assemble", "batch"], stop),
        ),
    ]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        stop.set("test")
        for thread in threads:
            thread.join(60)
        source.close()


def test_workers_join_and_leave_and_every_group_is_whole(bootstrap: str, tiny_model: Path, tmp_path: Path) -> None:
    rig = Rig(
        bootstrap, tmp_path, tiny_model, hash(tmp_path) % 10**6, slots=4,
        options={"step_seconds": 0.05, "mean_length": 4.0}, lease_seconds=20.0,
    )  # fmt: skip
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}=", "answer": str(n)}) + "\n" for n in range(GROUPS)))
    plain = rig.config.model_dump()
    plain["run"] |= {"group_partitions": 2, "lanes": 2}
    plain["streams"]["main"] |= {"dataset": str(data), "group_size": SIZE, "epochs": 1, "shuffle": False}
    plain["trainer"] |= {"batch_groups": GROUPS // 2}
    rig.config = RunConfig.model_validate(plain)
    rig.write("run", rig.manifest, 0, key=b"manifest")
    rig.publish(0)
    stop = StopSignal()
    fleet = Fleet(rig)

    def done() -> int:
        return len({(t.group, t.replica) for t in rig.decoded("trajectories") if isinstance(t, Trajectory)})

    def workers() -> set[str]:
        return {t.worker for t in rig.decoded("trajectories") if isinstance(t, Trajectory)}

    events: list[tuple[str, int]] = []

    def event(name: str) -> None:
        events.append((name, time.time_ns() // 1_000_000))

    source = Source(rig.connection, rig.config, "main", "src", stop)
    try:
        with operators(rig, source, stop) as errors:
            fleet.join("rollout-0")
            rig.until(lambda: done() >= 20)
            event("1 to 4")
            for number in (1, 2, 3):
                fleet.join(f"rollout-{number}")
            rig.until(lambda: len(workers()) == 4)
            event("4 to 1")
            assert [fleet.leave(f"rollout-{number}") for number in (0, 1, 2)] == [0, 0, 0]
            assert done() < GROUPS * SIZE, "they left under load"
            event("1")
            rig.until(lambda: done() == GROUPS * SIZE, 150)
            kept = rig.until(
                lambda: (
                    (k := [r for _, r in read_records(rig.connection, "ledger") if isinstance(r, Kept)])
                    and len(k) == GROUPS
                    and k
                )
            )
        assert not errors
    finally:
        fleet.kill()
        rig.reader.close()
    assert len({record.group for record in kept}) == GROUPS, "each group once"
    ledger = [record for _, record in read_records(rig.connection, "ledger")]
    assert sum(isinstance(record, Opened) for record in ledger) == GROUPS
    assert not [record for record in ledger if isinstance(record, Closed)], "no group failed"
    times = sorted(raw.timestamp_ms for raw in rig.connection.read_topic("trajectories"))
    for (name, begin), (_, end) in itertools.pairwise([*events, ("", times[-1])]):
        gaps = [b - a for a, b in itertools.pairwise(times) if begin <= b and a <= end]
        print(f"longest silence of the fleet, {name}: {max(gaps)} ms")
