"""One run of a recipe's stages, engine and trainer in one process: what it sampled, what it trained, how well it does.

The three stages run with their operators over topics in memory, so credits, batches, replay and skipped prompts are
those of a real run; prompts come from the recipe's dataset in the order of its source. In turns, everything admitted is
sampled by the newest weights and one batch is trained, so counts are exact and the same on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.losses import Sampler, copied, prompts_of
from headrace.connectors.datasets.prompts import PromptDataset
from headrace.pipeline import flow
from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.pipeline.workflows.workflow import sequence_of
from headrace.schemas.config import RunConfig
from headrace.schemas.ids import group_partition, inbox_of
from headrace.schemas.parts import HostedPolicy
from headrace.schemas.records import Closed, Demand, End, Item, Manifest, Skipped, Step, Task, Trajectory
from headrace.trainers.backends.open import open_backend
from headrace.trainers.ranks import Ranks
from headrace.trainers.update import Learner

WORKER, AHEAD = "worker", 256
ENDS = 4
"""Samples of every held-out prompt at the start and at the end; in between it is one."""


class DataRun:
    """A run by its configuration, from the weights in ``warm``; ``play`` gives its figures."""

    def __init__(self, config: RunConfig, warm: Path) -> None:
        flow.validate(config)
        self.config = config
        self.driver = TopologyDriver(config, flow.STAGES)
        self.dataset = PromptDataset("main", config.streams["main"], rewards=("exact_match",), seed=config.run.seed)
        self.sampler = Sampler(warm, config)
        ranks = Ranks()
        self.backend = open_backend(config.trainer_of("main"), str(warm), ranks)
        self.learner = Learner(config, "main", self.backend, ranks)
        self.position = self.sequence = self.read = self.manifests = self.version = 0
        self.rollouts = self.trained = 0
        self.partition = inbox_of(WORKER, config.run.inboxes)
        self._load()

    def play(self, eval_every: int) -> dict[str, Any]:
        """Sample and train until the data's end by samples; figures, and [rollouts, accuracy] along the way.

        ``visits``: offers of each prompt, those that were skipped included. ``seconds``: of processor time.
        """
        began = time.process_time()
        held_out = prompts_of("eval.jsonl")
        curve = [[0, self.sampler.accuracy(held_out * ENDS)]]
        while self._turn():
            if self.version % eval_every == 0 and len(curve) <= self.version // eval_every:
                curve.append([self.rollouts, self.sampler.accuracy(held_out)])
        curve.append([self.rollouts, self.sampler.accuracy(held_out * ENDS)])
        ledger = self.driver.records("ledger")
        return {
            "accuracy": curve[-1][1],
            "rollouts": self.rollouts,
            "trained": self.trained,
            "steps": self.version,
            "filtered_groups": sum(isinstance(r, Closed) and r.reason == "filtered" for r in ledger),
            "skipped_prompts": sum(isinstance(r, Skipped) for r in ledger),
            "visits": self._offered() / len(self.dataset),
            "seconds": time.process_time() - began,
            "curve": curve,
        }

    def _turn(self) -> bool:
        """Sample what is admitted, train one batch; false once the policy's data has ended."""
        self.driver.now_ms += 1000
        self._publish()
        self._demand()
        self.driver.settle()
        self._sample(list(self._tasks()))
        self._demand()
        self.driver.settle()
        return self._train()

    def _publish(self) -> None:
        """Prompts of the stream in the source's order, a stretch ahead of what is used."""
        ahead = self._offered() + AHEAD
        while self.position < ahead:
            self.driver.append("prompts", self.dataset.prompt(self.position))
            self.position += 1

    def _offered(self) -> int:
        """Prompts that were skipped or became a group."""
        skipped = sum(isinstance(r, Skipped) for r in self.driver.records("ledger"))
        return skipped + sum(len(self.driver.log["admissions", p]) for p in range(self.config.run.group_partitions))

    def _demand(self) -> None:
        self.driver.append(
            "demand",
            Demand(
                worker=WORKER, incarnation=1, role="any", capacity=1 << 16, next_sequence=self.sequence,
                inbox=self.partition, sent_ms=self.driver.now_ms,
                policies=[HostedPolicy(policy=0, version=self.version)],
            ),
        )  # fmt: skip

    def _tasks(self) -> Iterator[Task]:
        log = self.driver.log["tasks", self.partition]
        for entry in log[self.read :]:
            if isinstance(entry.record, Task):
                self.sequence = entry.record.sequence + 1
                yield entry.record
        self.read = len(log)

    def _sample(self, tasks: list[Task]) -> None:
        for task, (prompt, tokens, sampling, generation) in zip(
            tasks, self.sampler.sample([task.prompt for task in tasks]), strict=True
        ):
            self.rollouts += 1
            self.driver.append(
                "trajectories",
                Trajectory(
                    group=task.group, replica=task.replica, attempt=task.attempt, worker=WORKER, incarnation=1,
                    stream=task.stream, prompt_id=prompt.prompt_id, status="train", end_reason=generation.end_reason,
                    reward=self.sampler.score(prompt, generation), tokens=int(generation.tokens.size),
                    started_ms=task.issued_ms, finished_ms=self.driver.now_ms,
                    sequences=[sequence_of(0, "policy", tokens, generation, sampling)],
                ),
                partition=group_partition(task.group, self.config.run.group_partitions),
            )  # fmt: skip

    def _train(self) -> bool:
        records = self.driver.records("manifests")[self.manifests :]
        if not records:
            return True
        manifest = records[0]
        if isinstance(manifest, End):
            return False
        assert isinstance(manifest, Manifest)
        lanes = range(self.config.run.lanes)
        items = [r for lane in lanes for r in self.driver.records("batches.main", lane)]
        mine = [r for r in items if isinstance(r, Item) and r.batch == manifest.batch]
        learned = self.learner.train(mine, manifest, self.version)
        self.manifests, self.version = self.manifests + 1, self.version + 1
        self.trained += len(mine)
        self._load()
        self.driver.append("steps", _step(manifest.batch, learned.updates, learned.loss, learned.metrics))
        return True

    def _load(self) -> None:
        self.sampler.load(copied(self.backend.weights()), self.version)


def _step(batch: int, updates: int, loss: float, metrics: Mapping[str, float]) -> Step:
    return Step(
        policy=0, batch=batch, version=batch, lineage=0, updates=updates, loss=loss, tokens=0, sequences=0,
        wait_seconds=0.0, step_seconds=0.0, publish_seconds=0.0, delta_bytes=0, changed_share=0.0, finished_ms=0,
        metrics=dict(metrics),
    )  # fmt: skip
