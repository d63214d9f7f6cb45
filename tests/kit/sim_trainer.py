"""The real trainer in a ``sim_world``: lineage, versions, checkpoints and Kafka's part of it, around a toy step.

The weights are the list of the batches that made them, so what the store serves and what a checkpoint holds can be read
off. A trainer dies at any call, is frozen and gets a twin, and goes back to an earlier version.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sim_cluster import SimConnection
from sim_threads import sim_threading
from sim_time import Killed, SimProcess, SimStop, SimTime, SimWatchdog

from headrace.connectors.checkpoints import BrokenCheckpoint
from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.image import load_image
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError, Superseded
from headrace.schemas.records import Item, Manifest, Resumed, Rollback, Step, Stop
from headrace.trainers import batch_to_step, checkpoint_saver, lanes, patience, step_log, step_to_delta
from headrace.trainers.batch_to_step import Rewind, Trainer
from headrace.trainers.lanes import Stopped
from headrace.trainers.ranks import Ranks
from headrace.trainers.update import Learned

if TYPE_CHECKING:
    from flow_world import PolicyPlan
    from sim_world import ClusterWorld

MODULES = (batch_to_step, checkpoint_saver, patience, step_log, step_to_delta)
THREADED = (checkpoint_saver, lanes)
LONGEST = 255
"""Batches that the weights can hold."""


class ToyBackend:
    """Weights that say which batches made them."""

    def __init__(self) -> None:
        self.history: list[int] = []

    def weights(self) -> dict[str, npt.NDArray[np.uint16]]:
        """The length, then the batches."""
        out = np.zeros(LONGEST + 1, np.uint16)
        out[0] = len(self.history)
        out[1 : 1 + len(self.history)] = self.history
        return {"history": out}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One tensor."""
        return {"history": (LONGEST + 1,)}

    def shards(self) -> None:
        """All is on rank 0."""

    def save(self, folder: Path) -> None:
        """One file."""
        (folder / "history.json").write_text(json.dumps(self.history), "utf-8")

    def load(self, folder: Path) -> None:
        """Take the file up."""
        self.history = json.loads((folder / "history.json").read_text("utf-8"))


def history_of(weights: Mapping[str, npt.NDArray[Any]]) -> list[int]:
    """The batches that made weights, oldest first."""
    flat = weights["history"].reshape(-1)
    return [int(x) for x in flat[1 : 1 + int(flat[0])]]


class ToyLearner:
    """Adds a batch to the weights in so many seconds; the process may die before it and after it."""

    seconds = 0.3

    def __init__(self, config: RunConfig, policy: str, backend: ToyBackend, ranks: Ranks) -> None:
        self._backend = backend
        self.state = backend
        """What checkpoints save."""

    def train(self, items: Sequence[Item], manifest: Manifest, version: int) -> Learned:
        """A step."""
        process = batch_to_step.time.me()  # type: ignore[attr-defined]
        process.step()
        process.block(self.seconds)
        self._backend.history = [*self._backend.history, manifest.batch]
        process.step()
        return Learned(loss=0.0, updates=1, metrics={"staleness/mean": 0.0})


@contextmanager
def toy_parts(time: SimTime) -> Iterator[None]:
    """Put the toy step in the trainer, export nothing, and let its threads be the simulation's."""
    learner, export, watchdog = batch_to_step.Learner, batch_to_step.export_model, step_log.Watchdog
    step_log.Watchdog = SimWatchdog  # type: ignore[misc]
    for module in THREADED:
        module.threading = sim_threading(time)  # type: ignore[attr-defined]
    batch_to_step.Learner = ToyLearner  # type: ignore[misc, assignment]
    batch_to_step.export_model = lambda *_: None  # type: ignore[assignment]
    try:
        yield
    finally:
        batch_to_step.Learner = learner  # type: ignore[misc]
        batch_to_step.export_model = export  # type: ignore[assignment]
        step_log.Watchdog = watchdog  # type: ignore[misc]
        for module in THREADED:
            module.threading = threading  # type: ignore[attr-defined]


class RealTrainer:
    """The trainer of a policy that a launcher keeps alive, with what ``flow_world.World`` asks of its own."""

    def __init__(self, world: ClusterWorld, policy: int, plan: PolicyPlan) -> None:
        self.world, self.policy, self.plan = world, policy, plan
        self.name = world.config.policy_names()[policy]
        self.processes: list[SimProcess] = []
        self.held = False
        self.chain = Chain(world.objects, world.config.run.id, self.name)
        world.objects.listeners.append(self._stored)
        self.rng = random.Random(f"trainer {world.plan.seed} {policy}")

    @property
    def head(self) -> int:
        """The newest version in the store."""
        return max(self.chain.versions(), default=0)

    @property
    def history(self) -> list[int]:
        """The batches that made the newest version."""
        return self.history_of(self.head)

    def history_of(self, version: int) -> list[int]:
        """The batches that made a version, from the objects that serve it."""
        image = load_image(self.chain, version)
        return history_of(image.layout.views(image.data))

    def _stored(self, key: str) -> None:
        if self.chain.keys.version_of(key) is not None:
            for worker in self.world.workers:
                delay = self.world.rng.uniform(*self.world.plan.load_ms)
                worker.later(delay, lambda w=worker: w.load(self.policy))

    # life

    def records(self, kind: type) -> list[Any]:
        """Records of a kind in this policy's ``steps``."""
        return [r for r in self.world.driver.records("steps", self.policy) if isinstance(r, kind)]

    @property
    def stopped(self) -> bool:
        """Whether Stop is written."""
        return bool(self.records(Stop))

    @property
    def live(self) -> SimProcess | None:
        """The newest process, if it runs."""
        newest = self.processes[-1] if self.processes else None
        return newest if newest is not None and newest.alive else None

    def go_on(self) -> None:
        """Start."""
        self.start()

    def start(self, rewind: Rewind | None = None) -> None:
        """A new process."""
        world = self.world
        backend, stop = ToyBackend(), SimStop(world.driver.time)
        lineage = max((r.lineage for r in self.records(Rollback)), default=0)

        def main() -> None:
            trainer = Trainer(
                world.config, self.name, instance=f"trainer-{self.name}",
                connection=SimConnection(world.driver.cluster).patient(stop.is_set), store=world.store,
                backend=backend, ranks=Ranks(), stop=stop, rewind=rewind,
            )  # fmt: skip
            trainer.run()
            trainer.close()

        process = SimProcess(
            world.driver.time, f"trainer.{self.name}", main, lambda error: self._ended(process, error, rewind, lineage)
        )
        if not self.processes:
            process.kill_at = world.plan.kill_steps.get(process.name, -1)
        self.processes.append(process)

    def _ended(self, process: SimProcess, error: BaseException | None, rewind: Rewind | None, lineage: int) -> None:
        """Start it again, going back once more only if that was not written down."""
        self.world.stats["trainers ended"] += error is not None
        if error is None:
            return
        refused = rewind is not None and isinstance(error, ConfigurationError)
        # A fenced predecessor may still replace or prune the checkpoint that is being loaded: a restart finds the next.
        if not refused and not isinstance(error, Killed | Stopped | Superseded | BrokenCheckpoint):
            self.world.violation(f"died: trainer of {self.name}: {type(error).__name__}: {error}")
        done = any(r.lineage > lineage for r in self.records(Rollback)) or isinstance(error, ConfigurationError)
        again = rewind if not done else None
        self.world.driver.time.at(self.rng.uniform(0.5, 5), lambda: self._again(again))

    def _again(self, rewind: Rewind | None) -> None:
        if not self.held and not self.stopped and self.live is None:
            self.start(rewind)

    # faults

    def pause(self, milliseconds: float) -> None:
        """Stand still."""
        if self.live is not None:
            self.live.freeze(milliseconds / 1000)

    def die_soon(self) -> None:
        """Die at one of the next calls."""
        if self.live is not None:
            self.live.kill_at = self.live.steps + self.rng.randint(1, 25)

    def zombie(self) -> None:
        """Stand still, be taken for dead, and have a successor."""
        if self.live is not None:
            self.live.freeze(self.rng.uniform(1, 25))
            self.world.driver.time.at(self.rng.uniform(0.1, 6), self._successor)

    def overlap(self) -> None:
        """Have a successor while it works."""
        if self.live is not None:
            self._successor()

    def _successor(self) -> None:
        if not self.held and not self.stopped:
            self.start()

    def hold(self) -> None:
        """Stand until the other policy has trained all its data; then go on."""
        self.held = True
        if self.live is not None:
            self.live.kill()
        other: RealTrainer = self.world.trainers[1 - self.policy]

        def back() -> None:
            late = self.world.now > self.world.start_ms + self.world.plan.limit_ms / 2
            if self.world.plan.pacing == "any" and not other.stopped and not late:
                self.world.at(2000, back)
                return
            if late:
                self.world.violation(f"policy {other.policy} does not finish while trainer {self.policy} stands")
            self.held = False
            self.start()

        self.world.at(60_000, back)

    def roll_back(self, share: float) -> None:
        """``--resume-from`` an earlier version, while the present process is killed or merely stands still."""
        live = self.live
        if live is None or self.stopped or self.held or not self.records(Step):
            return
        self.world.stats["rollbacks"] += 1
        if self.rng.random() < 0.5:
            live.kill()
        else:
            live.freeze(self.rng.uniform(1, 15))
        self.start(Rewind(version=round(share * self.head), discard=self.world.plan.discard))


def trainer_violations(trainer: RealTrainer, finished: bool) -> list[str]:
    """What must be true of steps, versions and weights of a policy, whatever happened to its trainers."""
    bad, name = [], trainer.name
    announced = trainer.records(Step | Resumed)  # type: ignore[arg-type]
    versions = [r.version for r in announced]
    if any(a >= b for a, b in itertools.pairwise(versions)):
        bad.append(f"versions: steps of {name} are {versions}")
    links = [trainer.chain.link(v).manifest for v in trainer.chain.versions()]
    by_version = {m.version: m for m in links}
    for record in announced:
        made = by_version.get(record.version)
        if made is None or (made.lineage, made.batch) != (record.lineage, record.batch):
            bad.append(f"pairing: {name}: {record.version} is announced as batch {record.batch}, weights are {made}")
    for a, b in itertools.pairwise(links):
        if a.lineage == b.lineage and b.batch != a.batch + 1:
            bad.append(f"lineage: {name}: version {b.version} of batch {b.batch} follows batch {a.batch}")
    for made in links:
        held = trainer.history_of(made.version)
        if held != list(range(1, made.batch + 1)):
            bad.append(f"weights: {name}: version {made.version} of batch {made.batch} was made by {held}")
    base = {r.lineage: r.base_batch for r in trainer.records(Rollback)}
    bad += [
        f"base: {name}: lineage {r.lineage} resumed at batch {r.batch}, rolled back to {base}"
        for r in trainer.records(Resumed)
        if r.batch != base.get(r.lineage)
    ]
    if finished:
        composed = sum(isinstance(r, Manifest) for r in trainer.world.driver.records("manifests", trainer.policy))
        wanted = min(composed, trainer.plan.max_steps or composed)
        stepped = {r.batch for r in announced} - {0}
        if stepped != set(range(1, wanted + 1)):
            bad.append(f"steps: {name}: {sorted(stepped)} of {wanted}")
        if trainer.history != list(range(1, wanted + 1)):
            bad.append(f"final weights: {name}: {trainer.history} of {wanted}")
    return bad
