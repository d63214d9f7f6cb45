"""The compactor and the garbage collector as processes: killed anywhere and started again, no reader is outrun."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.kafka import Connection
from headrace.connectors.stores.chain import Chain, MissingLink
from headrace.connectors.stores.open import open_store
from headrace.pipeline.delta_prune import live_versions
from headrace.pipeline.delta_to_worker import WeightReader, verify_chain
from headrace.pipeline.delta_upkeep import checkpoint_versions, evaluated_versions, prune_run
from headrace.schemas.codec import encode
from headrace.schemas.config import EvalConfig, RunConfig, dump_config
from headrace.schemas.delta_layout import Layout
from headrace.schemas.parts import HostedPolicy
from headrace.schemas.records import Demand, EvalResult
from headrace.schemas.topics import partition_counts
from headrace.trainers.step_to_delta import DeltaPublisher

SHAPE = (64, 48)


def weights_of(version: int) -> dict[str, np.ndarray]:
    bits = np.random.default_rng(1).integers(0, 1 << 15, SHAPE, np.uint16)
    for number in range(1, version + 1):
        bits[np.random.default_rng(number).random(SHAPE) < 0.02] += 1
    return {"w": bits}


class Place:
    """A run's store and topics, and the processes that look after the store."""

    def __init__(self, folder: Path, bootstrap: str, grace: float) -> None:
        name = f"upkeep-{uuid.uuid4().hex[:8]}"
        upkeep = {"compact_seconds": 0.05, "prune_seconds": 0.05, "prune_grace_seconds": grace}
        self.config = RunConfig.model_validate(
            {
                "run": {"id": name, "folder": str(folder)},
                "store": upkeep,
                "policies": {"main": {"model": "none"}},
                "streams": {"main": {"dataset": "none.jsonl"}},
            }
        )
        self.file = self.config.run_folder() / "config.json"
        self.file.parent.mkdir(parents=True)
        dump_config(self.config, self.file)
        self.store = open_store(self.config.store, self.config.run_folder())
        self.connection = Connection.of(self.config.kafka, name, bootstrap)
        self.connection.ensure_topics(partition_counts(["main"], groups=1, inboxes=1, lanes=1))
        layout = Layout.of(weights_of(0), {"w": "bfloat16"}, segment_bytes=1024)
        self.publisher = DeltaPublisher(self.store, name, "main", layout, 5)
        self.producer = self.connection.producer("worker")
        self.processes: list[subprocess.Popen[bytes]] = []

    def advance(self, versions: int) -> None:
        for _ in range(versions):
            head = self.publisher.baseline
            number = head.version + 1 if head else 0
            self.publisher.publish(weights_of(number), version=number, lineage=0, batch=number, parent=head)

    def reader(self) -> WeightReader:
        return WeightReader(self.store, self.config.run.id, "main")

    def correct(self, reader: WeightReader) -> bool:
        return np.array_equal(reader.snapshot().weights["w"], weights_of(reader.version)["w"])

    def beat(self, version: int, *, age: float = 0.0) -> None:
        """A worker says that it has a version, or said so ``age`` seconds ago."""
        hosted = HostedPolicy(policy=0, version=version)
        record = Demand(
            worker="rollout-0",
            incarnation=1,
            role="rollout",
            capacity=1,
            inbox=0,
            next_sequence=0,
            policies=[hosted],
            held=[],
            sent_ms=int((time.time() - age) * 1000),
        )
        self.connection.produce(self.producer, "demand", encode(record), partition=0)
        self.producer.flush(10)

    def start(self, task: str) -> subprocess.Popen[bytes]:
        words = ["--config", str(self.file), "--bootstrap", self.connection.bootstrap, "--exit-with-parent"]
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.pipeline.delta_upkeep", *words, "--task", task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.processes.append(process)
        return process

    def merges(self) -> set[tuple[int, int]]:
        chain = Chain(self.store, self.config.run.id, "main")
        return {(one.first, one.version) for ones in chain.merges(0, 10**6).values() for one in ones}

    def sizes(self) -> dict[str, int]:
        root = f"runs/{self.config.run.id}/main"
        return {kind: len(list(self.store.list(f"{root}/{kind}/"))) for kind in ("delta", "full", "merged")}


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, bootstrap: str) -> Iterator[Place]:
    place = Place(tmp_path, bootstrap, getattr(request, "param", 0.0))
    yield place
    for process in place.processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def until(done: object, what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.mark.parametrize("place", [1.0], indirect=True, ids=["a second of grace"])
def test_both_work_killed_or_not_while_a_reader_follows_and_end_with_their_parent(place: Place) -> None:
    place.advance(1)
    reader = place.reader()
    reader.fetch()
    place.beat(0)
    place.advance(16)
    compact, prune = place.start("compact"), place.start("prune")
    until(lambda: (12, 16) in place.merges(), "no merged delta over 4 versions was made")
    for task, process in (("compact", compact), ("prune", prune)):
        process.kill()
        process.wait()
        place.start(task)
    # What the living reader needs is there however often pruning runs: its versions' chain, from before two fulls.
    for _ in range(3):
        assert prune_run(place.config, place.store, "main", place.connection).floor == 0
    reader.fetch()
    assert reader.version == 16
    assert place.correct(reader)
    place.beat(16)
    chain = Chain(place.store, place.config.run.id, "main")
    until(lambda: chain.pruned_below() == 10, "nothing was pruned once the reader had gone on")
    until(lambda: place.sizes()["full"] == 2, "fulls of pruned versions stay")
    place.advance(9)
    assert prune_run(place.config, place.store, "main", place.connection).floor == 15
    place.beat(25)
    until(lambda: place.sizes()["full"] == 2 and chain.pruned_below() == 20, "pruning does not follow")
    late = place.reader()
    late.fetch()
    assert late.version == 25
    assert place.correct(late)
    assert not [one.problem for one in verify_chain(place.store, place.config.run.id, "main") if one.problem]
    for process in place.processes[2:]:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(20) for process in place.processes[2:]] == [0, 0]


@pytest.mark.parametrize("task", ["compact", "prune"])
def test_killed_again_and_again_in_the_middle_no_version_is_lost(place: Place, task: str) -> None:
    """Processes die after growing times, so that kills fall into every part of a round."""
    place.advance(21)
    place.beat(18)
    for number in range(4):
        process = place.start(task)
        assert process.stdout is not None
        time.sleep(0.6 + 0.15 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
    problems = [one.problem for one in verify_chain(place.store, place.config.run.id, "main") if one.problem]
    assert not problems
    reader = place.reader()
    for version in (18, 20):
        reader.fetch(version)
        assert place.correct(reader)


def test_a_reader_that_fell_silent_or_too_far_behind_holds_nothing(place: Place) -> None:
    place.advance(17)
    place.beat(3, age=120)
    assert live_versions(place.connection, 0) == []
    place.beat(3)
    assert live_versions(place.connection, 0) == [3]
    assert live_versions(place.connection, 1) == []
    assert prune_run(place.config, place.store, "main", place.connection, dry=True).floor == 0
    near = place.config.model_copy(update={"store": place.config.store.model_copy(update={"prune_max_lag": 10})})
    assert prune_run(near, place.store, "main", place.connection, dry=True).floor == 10


def test_a_kept_checkpoint_holds_its_version_wherever_it_lies(place: Place) -> None:
    place.advance(17)
    table = b'{"format": "headrace-checkpoint/2", "lineage": 0, "batch": 7, "version": 7, "manifests": 0, '
    table += b'"written_ms": 0, "lanes": {}, "files": {}}'
    folder = place.config.run_folder() / "checkpoints" / "main" / "0000-000000007"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_bytes(table)
    (folder.parent / "0000-000000001").mkdir()
    (folder.parent / "0000-000000001" / "checkpoint.json").write_bytes(table[:40])
    assert list(checkpoint_versions(place.config, place.store, "main")) == [7]
    assert prune_run(place.config, place.store, "main", place.connection, dry=True).floor == 5
    trainer = place.config.trainer.model_copy(update={"checkpoint_url": "store"})
    stored = place.config.model_copy(update={"trainer": trainer})
    assert list(checkpoint_versions(stored, place.store, "main")) == []
    place.store.put(f"checkpoints/{place.config.run.id}/main/0000-000000012/checkpoint.json", table)
    assert list(checkpoint_versions(stored, place.store, "main")) == [7]


def test_the_best_version_and_those_still_being_evaluated_stay(place: Place) -> None:
    place.advance(23)
    evaluation = {"dataset": "held", "every": 4, "samples": 2, "best": "pass@2"}
    config = place.config.model_copy(update={"eval": EvalConfig.model_validate(evaluation)})
    assert evaluated_versions(place.config, place.store, "main", place.connection) == []
    for version, replicas, reward in ((0, 2, 0.0), (4, 2, 1.0), (8, 2, 0.5), (12, 1, 1.0)):
        for replica in range(replicas):
            result = EvalResult(
                policy=0, suite="heldout", prompt_id="p", replica=replica, version=version, oldest_version=version,
                newest_version=version, reward=reward, tokens=1, end_reason="stop", finished_ms=1,
            )  # fmt: skip
            place.connection.produce(place.producer, "evals", encode(result), partition=0)
    place.producer.flush(10)
    assert evaluated_versions(config, place.store, "main", place.connection) == [12, 16, 20, 4]
    assert prune_run(config, place.store, "main", place.connection).floor == 15
    reader = place.reader()
    for version in (4, 12, 22):
        reader.fetch(version)
        assert place.correct(reader)
    with pytest.raises(MissingLink):
        place.reader().fetch(8)


def test_what_is_uploaded_and_waits_for_its_commit_stays_whatever_the_grace(place: Place) -> None:
    """A trainer that cannot reach the store repeats the commit alone: the objects have to be there."""
    place.advance(2)
    key = Chain(place.store, place.config.run.id, "main").keys.shard("delta", 2, "0-waiting", 0)
    place.store.put(key, b"changes")
    done = prune_run(place.config, place.store, "main", place.connection)
    assert done.orphans == 0
    assert place.store.get(key) == b"changes"
