"""A run in virtual time: the product's stages on the stage driver, with latencies for everything that is no stage.

``schedule``, ``assemble`` and ``batch`` are the ones of a real run (``pipeline.flow.STAGES``); a record reaches its
reader after a hop, as it would through a topic. Workers and trainers are models that take time. Same plan, same run.
"""

import gc
import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np

from headrace.pipeline import flow
from headrace.pipeline.simulation.clock import Clock
from headrace.pipeline.simulation.draws import Draws, GroupDraw
from headrace.pipeline.simulation.lean import LeanDriver
from headrace.pipeline.simulation.measure import Outcome, StepSeen, spans
from headrace.pipeline.simulation.plan import Plan
from headrace.pipeline.simulation.trainer import Trainer
from headrace.pipeline.simulation.worker import Worker
from headrace.schemas.errors import HeadraceError
from headrace.schemas.records import Admission, Cancel, Closed, Manifest, Prompt, Record, Task

__all__ = ("Stalled", "World", "simulate")

_START_MS = 1_000_000
_AHEAD = 320
"""Prompts that the source keeps ahead of admission."""

Place = tuple[str, int]


class Stalled(HeadraceError):
    """A simulated run stopped moving before its last step."""


class World:
    """Time, topics, workers and trainers of one plan. ``on_step`` is called after every step of every trainer."""

    def __init__(self, plan: Plan, on_step: Callable[["World"], None] | None = None) -> None:
        self.plan = plan
        self.config = plan.config()
        self.clock = Clock(self._moved)
        self.driver = LeanDriver(self.config, flow.STAGES, start_ms=_START_MS)
        self.driver.listeners.append(self._written)
        self.draws = Draws(plan)
        self.noise = np.random.Generator(np.random.PCG64([plan.seed, 1 << 30]))
        self.trainers = [Trainer(self, policy) for policy in range(plan.flow.policies)]
        self.workers: list[Worker] = []
        self.lost: Counter[str] = Counter()
        self.issued: set[tuple[int, int]] = set()
        """Replicas that a worker was given."""
        self.admitted = 0
        self._on_step = on_step
        self._hop = plan.machines.hop_seconds
        self._tick_seconds = max(1.0, plan.deadline_seconds() / 200)
        self._progress = 0.0
        self._published = 0
        self._poked: set[Place] = set()
        self._readers: dict[Place, list[Place]] = {}
        self._numbers = itertools.count()
        self._engine_seconds = 0.0
        self._engines_seen = 0.0
        for key, task in self.driver.tasks.items():
            for place in task.inputs:
                self._readers.setdefault(place, []).append(key)
        self._publish()
        for _ in range(plan.machines.engines):
            self.join()
        self._tick()

    # ------------------------------------------------------------------------------------------------ the run

    def play(self) -> "World":
        """Run until every trainer has done its steps. Raises Stalled when nothing is ahead, or nothing moves."""
        patience = 20 * self.plan.deadline_seconds() + 1000 * self.plan.machines.hop_seconds
        while any(len(t.steps) < self.plan.steps for t in self.trainers):
            if not self.clock.step() or self.clock.now > self._progress + patience:
                raise Stalled(f"after {self.clock.now:.0f} s of simulated time: {self._state()}")
        return self

    def _moved(self, seconds: float) -> None:
        self.driver.now_ms = _START_MS + round(1000 * seconds)

    def _state(self) -> str:
        done = ", ".join(f"policy {t.policy}: {len(t.steps)} of {self.plan.steps} steps" for t in self.trainers)
        held = sum(w.held for w in self.workers)
        return f"{done}; {held} tasks held, groups closed: {dict(self.lost) or 'none'}"

    def join(self) -> None:
        """A worker joins."""
        self._count_engines()
        self.workers.append(Worker(self, next(self._numbers)))

    def shrink(self) -> None:
        """The newest worker ends what it holds and goes."""
        staying = [w for w in self.workers if not w.leaving]
        if staying:
            staying[-1].leave()

    def engines(self) -> int:
        """Workers that take tasks, and those that end theirs."""
        return sum(w.alive for w in self.workers)

    def _count_engines(self) -> None:
        self._engine_seconds += (self.clock.now - self._engines_seen) * self.engines()
        self._engines_seen = self.clock.now

    # ------------------------------------------------------------------------------------------------ topics

    def write(self, topic: str, record: Record, partition: int = 0) -> None:
        """Write a record from outside the stages."""
        self.driver.append(topic, record, partition=partition)

    def _written(self, place: Place) -> None:
        for key in self._readers.get(place, ()):
            self._poke(key)
        record = self.driver.log[place][-1].record
        match record:
            case Task():
                self.issued.add((record.group, record.replica))
                self.clock.after(self._hop, lambda: self._deliver(record))
            case Cancel():
                self.clock.after(self._hop, lambda: self._deliver(record))
            case Manifest():
                self.clock.after(self._hop, lambda: self.trainers[record.policy].take(record))
            case Admission():
                self.admitted += 1
                self._publish()
            case Closed():
                self.lost[record.reason] += 1
            case _:
                pass

    def _deliver(self, record: Task | Cancel) -> None:
        for worker in self.workers:
            if worker.name == record.worker and worker.alive:
                worker.take(record)

    def _poke(self, key: Place) -> None:
        if key not in self._poked:
            self._poked.add(key)
            self.clock.after(self._hop, lambda: self._turn(key))

    def _turn(self, key: Place) -> None:
        self._poked.discard(key)
        self.driver.turn(*key)
        if self.driver.behind(*key):
            self._poke(key)

    def _tick(self) -> None:
        """Silence, deadlines and timers are judged now and then."""
        for key in self.driver.tasks:
            self._poke(key)
        self._count_engines()
        self.clock.after(self._tick_seconds, self._tick)

    def _publish(self) -> None:
        if self._published - self.admitted > _AHEAD // 2:
            return
        while self._published - self.admitted < _AHEAD:
            n = self._published
            prompt = Prompt(
                prompt_id=f"{n:016x}", stream="main", dataset="none", row=n, epoch=0, position=n, prompt="?",
                answer="!", reward="exact_match",
            )  # fmt: skip
            self._published += 1
            self.write("prompts", prompt)

    # ------------------------------------------------------------------------------------------------ what others ask

    def draw(self, group: int) -> GroupDraw:
        """The work of a group."""
        return self.draws.group(group, len(self.trainers[0].steps) / self.plan.steps)

    def length_of(self, group: int, replica: int, policy: int) -> float:
        """Tokens that a policy sampled in an episode."""
        tokens = self.draw(group).tokens[replica]
        policies = self.plan.work.policies
        if len(policies) == 1:
            return float(tokens.sum()) if policies[0] == policy else 0.0
        return float(sum(t for turn, t in enumerate(tokens) if policies[turn % len(policies)] == policy))

    def published(self, policy: int, version: int) -> None:
        """New weights are in the store."""
        for worker in self.workers:
            if worker.alive:
                load = self.plan.machines.load_seconds
                self.clock.after(load, lambda w=worker: w.load(policy, version))  # type: ignore[misc]

    def measured(self, manifest: Manifest, waited: float, seconds: float) -> StepSeen:
        """What a step is remembered as; tells who asked to be told."""
        members = manifest.members
        self._progress = self.clock.now + seconds
        seen = StepSeen(
            ended=self.clock.now, waited=waited, trained=seconds, groups=manifest.groups, members=len(members),
            tokens=sum(self.length_of(m.group, m.replica, manifest.policy) for m in members),
            staleness=[manifest.start_version - m.oldest_version for m in members], engines=self.engines(),
        )  # fmt: skip
        if self._on_step is not None:
            self.clock.after(0.0, lambda: self._on_step(self) if self._on_step else None)
        return seen

    def outcome(self) -> Outcome:
        """The figures of the run."""
        self._count_engines()
        plan, steps = self.plan, self.trainers[0].steps[: self.plan.steps]
        since, measured = spans(steps, plan.warm_up)
        seconds = measured[-1].ended - since
        slowest = max(t.steps[plan.steps - 1].ended - spans(t.steps, plan.warm_up)[0] for t in self.trainers)
        members = sum(s.members for s in steps)
        trained = sum(s.tokens for s in steps)
        started = sum(self.draw(g).tokens[r].sum() for g, r in self.issued)
        population = [self.draw(g).lengths().mean() for g in {g for g, _ in self.issued}]
        staleness = [x for s in measured for x in s.staleness]
        busy = [engine.busy for worker in self.workers for engine in worker.engines]
        return Outcome(
            step_seconds=slowest / len(measured), first_batch_seconds=steps[0].ended, seconds=seconds,
            samples_per_second=sum(s.members for s in measured) / seconds,
            tokens_per_second=sum(s.tokens for s in measured) / seconds,
            wait_share=sum(s.waited for s in measured) / seconds,
            busy_share=sum(busy) / max(1e-9, self._engine_seconds * plan.flow.policies),
            mean_staleness=sum(staleness) / max(1, len(staleness)), max_staleness=max(staleness, default=0),
            tasks_share=len(self.issued) / max(1, members), started_share=float(started) / max(1e-9, trained),
            length_ratio=trained / max(1, members) / max(1e-9, float(np.mean(population))) if population else 1.0,
            lost_groups=dict(self.lost), engine_seconds=self._engine_seconds, steps=measured,
        )  # fmt: skip


def simulate(plan: Plan, on_step: Callable[[World], None] | None = None) -> Outcome:
    """Play a plan. Raises Stalled.

    A run keeps all its records and frees none of them, so looking for garbage meanwhile is time for nothing.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return World(plan, on_step).play().outcome()
    finally:
        if collecting:
            gc.enable()
