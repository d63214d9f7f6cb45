"""A run with one policy in which a test plays schedule, trainer and reader, and only a rollout worker is real."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import TopicPartition

from headrace.connectors.kafka import Connection, RawRecord
from headrace.connectors.model_folder import tokenizer_digest
from headrace.connectors.stores.local import LocalStore
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import RunConfig, dump_config
from headrace.schemas.delta_layout import Layout
from headrace.schemas.ids import inbox_of
from headrace.schemas.parts import PolicyBound, Sampling
from headrace.schemas.records import Demand, Prompt, Record, RunManifest, Task, Trajectory
from headrace.schemas.topics import partition_counts
from headrace.trainers.step_to_delta import DeltaPublisher

REWARDS = """
import time

def raises(prompt, completion):
    raise RuntimeError("no judge today")

def hangs(prompt, completion):
    time.sleep(3600)

def nan(prompt, completion):
    return float("nan")

def surrogate(prompt, completion):
    raise ValueError("bad text \\ud800 here")

def dies(prompt, completion):
    import os
    os._exit(3)

def fine(prompt, completion):
    return {"length": float(len(completion.tokens)), "bonus": 0.5}
"""


class Rig:
    """A run with one policy and no other part than what the test starts and writes."""

    def __init__(self, broker: str, folder: Path, model: Path, number: int, **rollout: Any) -> None:
        reward = rollout.pop("reward", "exact_match")
        rollout.setdefault("engine", "scripted")
        options = {"timeout_seconds": 1.0} if ":" in reward else {}
        stream = {"dataset": "none.jsonl", "reward": reward, "reward_options": options, **rollout.pop("stream", {})}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "test_rewards.py").write_text(REWARDS)
        self.config = RunConfig.model_validate(
            {
                "run": {"id": f"rig-{os.getpid()}-{number}", "folder": str(folder), "inboxes": 4},
                "kafka": {"bootstrap": broker},
                "rollout": {"slots": 8, "max_new_tokens": 8, "poll_seconds": 0.2, **rollout},
                "policies": {"main": {"model": str(model)}},
                "streams": {"main": stream},
            }
        )
        self.folder = folder
        self.model = model
        self.connection = Connection.of(self.config.kafka, self.config.run.id)
        counts = partition_counts(["main"], groups=2, inboxes=4, lanes=2)
        self.connection.ensure_topics(counts)
        self.producer = self.connection.producer("rig")
        self.manifest = RunManifest(
            run=self.config.run.id, created_ms=1, tokenizer_digest=tokenizer_digest(model), policies=["main"],
            partitions=counts,
        )  # fmt: skip
        self.store = LocalStore(self.config.run_folder() / "store")
        self.seen: dict[str, list[RawRecord]] = {}
        self.reader = self.connection.consumer("rig.reader", auto_offset_reset="earliest", fetch_wait_max_ms=50)
        read = {"demand": 1, "trajectories": 2, "evals": 1, "dead-letters": 1}
        self.reader.assign([TopicPartition(self.connection.topic(t), p, 0) for t, n in read.items() for p in range(n)])
        self.worker: subprocess.Popen[bytes] | None = None
        self.sequence = 0
        self.publisher: DeltaPublisher | None = None
        self.head: Any = None

    def begin(self, name: str = "rollout-0", role: str = "any") -> None:
        """Create the run, publish version 0 and start a worker."""
        self.write("run", self.manifest, 0, key=b"manifest")
        self.publish(0)
        self.start(name, role)

    def start(self, name: str = "rollout-0", role: str = "any") -> None:
        path = self.folder / "config.json"
        dump_config(self.config, path)
        self.log = self.folder / "worker.log"
        paths = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        with self.log.open("ab") as log:
            module = "headrace.pipeline.task_to_trajectory"
            self.worker = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(path), "--instance", name, "--role", role],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip

    def publish(self, version: int, *, nan: bool = False, whole: bool = False) -> None:
        """Publish weights that differ with the version; ``whole``: as by a publisher that knows no version before."""
        import torch
        from safetensors.torch import load_file

        bits: dict[str, np.ndarray] = {}
        for name, value in load_file(self.model / "model.safetensors").items():
            scaled = (value.float() * (1 + 0.02 * version)).to(torch.bfloat16)
            if nan and "norm" in name:
                scaled[:] = float("nan")
            bits[name] = scaled.view(torch.int16).numpy().view(np.uint16)
        if whole:
            self.publisher = self.head = None
        self.publish_bits(version, bits)

    def publish_bits(self, version: int, bits: dict[str, np.ndarray]) -> None:
        """Publish these weights, bfloat16 as bits."""
        if self.publisher is None:
            layout = Layout.of(bits, dict.fromkeys(bits, "bfloat16"))
            self.publisher = DeltaPublisher(self.store, self.config.run.id, "main", layout)
        self.head = self.publisher.publish(bits, version=version, lineage=0, batch=version, parent=self.head)

    def write(self, topic: str, record: Record, partition: int, key: bytes | None = None) -> None:
        headers = headers_of(record, self.config.run.id, "test")
        self.connection.produce(self.producer, topic, encode(record), partition=partition, key=key, headers=headers)
        assert self.producer.flush(10) == 0

    def to_worker(self, record: Record, name: str = "rollout-0") -> None:
        self.write("tasks", record, inbox_of(name, 4))

    def task(self, demand: Demand, group: int, replica: int = 0, **over: Any) -> Task:
        """A task for the incarnation that sent ``demand``."""
        now = int(time.time() * 1000)
        prompt = over.pop("prompt", "52436=")
        reward = over.pop("reward", self.config.streams["main"].reward)
        fields: dict[str, Any] = {
            "kind": "train", "group": group, "replica": replica, "attempt": 0, "stream": "main",
            "worker": demand.worker, "incarnation": demand.incarnation, "sequence": self.sequence, "issued_ms": now,
            "deadline_ms": now + 30_000, "sampling": Sampling(max_new_tokens=8),
            "policies": [PolicyBound(policy=0, min_version=over.pop("min_version", 0))],
            "workflow": self.config.streams["main"].workflow,
        }  # fmt: skip
        made = Prompt(
            prompt_id=f"{group:016x}", stream="main", dataset="none.jsonl", row=group, epoch=0, position=group,
            reward=reward, prompt=prompt, answer="23456",
        )  # fmt: skip
        self.sequence = over.get("sequence", self.sequence) + 1
        return Task(**{**fields, "prompt": made, **over})

    def records(self, topic: str, seconds: float = 0.0) -> list[RawRecord]:
        """What has been written to a topic so far, as far as it has come; waits up to ``seconds`` for more of any."""
        message = self.reader.poll(seconds)
        while message is not None:
            assert message.error() is None, message.error()
            raw = RawRecord.of(message, self.config.run.id)
            self.seen.setdefault(raw.topic, []).append(raw)
            message = self.reader.poll(0)
        return self.seen.get(topic, [])

    def decoded(self, topic: str) -> list[Any]:
        return [raw.decoded() for raw in self.records(topic)]

    def until(self, what: Callable[[], Any], seconds: float = 90) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := what():
                return found
            if self.worker is not None and self.worker.poll() is not None:
                found = what()
                assert found, f"the worker ended with {self.worker.returncode}:\n{self.log.read_text()}"
                return found
            self.records("", 0.1)
        raise AssertionError(f"not within {seconds} s; the worker says:\n{self.log.read_text()}")

    def demand(self, test: Callable[[Demand], bool] = lambda d: True) -> Demand:
        """The newest Demand, once it fits."""
        found: Demand = self.until(lambda: (d := self.decoded("demand")) and test(d[-1]) and d[-1])
        return found

    def trajectory(self, group: int, replica: int = 0) -> Trajectory:
        found: Trajectory = self.until(
            lambda: next((t for t in self.decoded("trajectories") if (t.group, t.replica) == (group, replica)), None)
        )
        return found

    def end(self) -> int:
        """Stop the worker if it runs; its exit status."""
        if self.worker is None:
            return 0
        if self.worker.poll() is None:
            self.worker.terminate()
        return self.worker.wait(20)
