"""A whole run in virtual time: the three stages on the TopologyDriver, scripted workers, toy trainers, and faults.

``Plan`` says what the run is like, ``random_plan`` draws one from a seed, ``World(plan).play()`` plays it to its end.
``flow_check`` judges the topics that it leaves. Same plan, same run.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.pipeline import flow
from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.pipeline.runtime.stage import StageFactory
from headrace.pipeline.trajectory_to_group import Assemble
from headrace.schemas.config import RunConfig
from headrace.schemas.ids import group_partition, inbox_of
from headrace.schemas.parts import HeldTask, HostedPolicy, MemberScore, Reward, Sequence
from headrace.schemas.records import (
    Cancel,
    Demand,
    End,
    EvalResult,
    Manifest,
    Prompt,
    Resumed,
    Rollback,
    Score,
    Step,
    Stop,
    Task,
    Trajectory,
)


@dataclass(kw_only=True)
class PolicyPlan:
    """The knobs of one policy and the pace of its trainer."""

    batch: int = 2
    depth: float = 1.0
    lag: int = 0
    bound: int = -1
    mode: str = "wait"
    extra: int = 0
    replay: float = 0.0
    ahead: int = 1
    max_steps: int = 0
    last: str = "train"
    step_ms: int = 300
    checkpoint_every: int = 3
    frozen: bool = False


@dataclass(kw_only=True)
class Plan:
    """A run: its size, its pace, and what goes wrong until ``fault_end_ms``."""

    seed: int = 0
    policies: list[PolicyPlan] = field(default_factory=lambda: [PolicyPlan()])
    pacing: str = "any"
    group_size: int = 2
    extra_replicas: int = 0
    retries: int = 1
    prompts: int = 12
    parts: int = 2
    workers: int = 2
    slots: int = 2
    speeds: tuple[float, ...] = (1.0,)
    task_ms: int = 500
    hang: float = 0.0
    flaky: float = 0.0
    zero_variance: float = -1.0
    """Share of groups with equal rewards; negative: no dynamic sampling at all."""
    silent: float = 0.0
    """Share of groups in which the second policy samples nothing: they fail for it alone."""
    scored: bool = False
    heldout: int = 0
    eval_every: int = 0
    skew: float = 0.0
    stage_crash: float = 0.0
    faults: tuple[str, ...] = ()
    mtbf_ms: int = 8000
    fault_end_ms: int = 0
    discard: bool = False
    hold: bool = False
    load_ms: tuple[int, int] = (50, 1500)
    publish_ms: tuple[int, int] = (20, 200)
    task_deadline_s: float = 25.0
    group_deadline_s: float = 100.0
    max_lost_leases: int = 5
    limit_ms: int = 2_500_000

    def config(self) -> RunConfig:
        """The run's configuration."""
        return RunConfig.model_validate(self.settings())

    def settings(self) -> dict[str, Any]:
        """What ``run.toml`` would say."""
        policies: dict[str, Any] = {}
        for i, p in enumerate(self.policies):
            trainer = {"batch_groups": p.batch, "max_steps": p.max_steps, "last_batch": p.last}
            policies[f"p{i}"] = {
                "model": "none",
                "depth": p.depth,
                "lag": p.lag,
                "max_staleness": p.bound,
                "mode": p.mode,
                "extra_groups": p.extra,
                "replay": p.replay,
                "ahead": p.ahead,
                "frozen": p.frozen,
                "trainer": trainer,
            }
        stream = {
            "dataset": "none",
            "group_size": self.group_size,
            "extra_replicas": self.extra_replicas,
            "retries": self.retries,
            "pacing": self.pacing,
        }
        return {
            "run": {"id": "world", "group_partitions": self.parts, "inboxes": 4, "lanes": 2},
            "rollout": {
                "task_deadline_seconds": self.task_deadline_s,
                "group_deadline_seconds": self.group_deadline_s,
                "max_lost_leases": self.max_lost_leases,
            },
            "eval": {"dataset": "none" if self.heldout else "", "every": self.eval_every},
            "policies": policies,
            "streams": {"main": stream},
            "operators": [{"type": "dynamic_sampling"}] if self.zero_variance >= 0 else [],
        }


def random_plan(seed: int) -> Plan:
    """A plan drawn from a seed; covers depths, bounds, modes, filters, replay, faults and their mixtures."""
    r = random.Random(f"plan {seed}")
    faults = tuple(
        f
        for f in ("kill", "freeze", "twin", "all_workers", "rollback", "stage", "stuck", "outage", "trainer")
        if r.random() < 0.5
    )
    if r.random() < 0.15:
        faults = ()
    policies = []
    for _ in range(r.choice([1, 1, 1, 2])):
        depth, lag = r.choice([0, 0, 0.5, 1, 1, 1.5, 2]), r.choice([0, 0, 0, 1])
        least = -int(-depth // 1) + lag
        policies.append(
            PolicyPlan(
                batch=r.randint(1, 5),
                depth=depth,
                lag=lag,
                bound=least + r.choice([0, 0, 0, 1, 2]),
                mode=r.choice(["wait", "wait", "drop"]),
                extra=r.choice([0, 0, 0, 2]),
                replay=r.choice([0, 0, 0.3, 0.5]),
                ahead=r.choice([0, 1]),
                max_steps=r.choice([0, 0, 0, 4]),
                last=r.choice(["train", "drop"]),
                step_ms=r.choice([300, 1000, 3000]),
                checkpoint_every=r.randint(1, 6),
            )
        )
    group_size = r.randint(1, 4)
    return Plan(
        seed=seed,
        policies=policies,
        pacing=r.choice(["any", "all", "p0"]),
        group_size=group_size,
        extra_replicas=r.choice([0, 0, 1, 2]),
        retries=r.choice([0, 1]),
        prompts=r.randint(4, 36),
        parts=r.randint(1, 3),
        workers=r.randint(1, 5),
        slots=r.randint(1, 3),
        speeds=r.choice([(1.0,), (1.0, 0.6, 0.3)]),
        task_ms=r.choice([500, 2000]),
        hang=r.choice([0, 0, 0.05]),
        flaky=r.choice([0, 0, 0.1]),
        zero_variance=r.choice([-1, -1, 0.3, 0.6]) if group_size > 1 else -1,
        scored=r.random() < 0.2,
        heldout=r.choice([0, 0, 3]),
        eval_every=r.choice([0, 2]),
        skew=r.choice([0, 0.2, 0.5]),
        stage_crash=0.01 if faults else 0.0,
        faults=faults,
        mtbf_ms=r.choice([5000, 12000, 30000]),
        fault_end_ms=r.choice([60_000, 150_000]) if faults else 0,
        discard=r.random() < 0.5,
        hold=len(policies) == 2 and r.random() < 0.3,
        silent=r.choice([0, 0.3]),
    )


def tight_plan(seed: int) -> Plan:
    """Presses on ``wait``: tight bounds, no surplus, failing groups, slow workers, inputs that stand still."""
    r = random.Random(f"tight {seed}")
    plan = random_plan(seed)
    for p in plan.policies:
        p.depth, p.lag = r.choice([0.5, 1, 1.5, 2, 3]), r.choice([0, 0, 1])
        p.bound, p.mode, p.extra, p.replay, p.max_steps, p.step_ms = -1, "wait", 0, 0.0, 0, r.choice([100, 300])
    plan.faults, plan.mtbf_ms, plan.fault_end_ms = r.choice([("stuck", "stage"), ("stuck",), ()]), 4000, 150_000
    plan.stage_crash, plan.hold, plan.zero_variance, plan.retries = 0.0, False, -1, 0
    plan.flaky, plan.group_size, plan.extra_replicas, plan.prompts = r.choice([0, 0.3]), 1, 0, 36
    plan.speeds = (1.0, 0.3, 0.1)
    return plan


def replay_plan(seed: int) -> Plan:
    """A tight plan with replay."""
    plan = tight_plan(seed)
    for p in plan.policies:
        p.batch, p.replay = max(2, p.batch), 0.5
    return plan


def stuck_plan(seed: int) -> Plan:
    """Inputs that stand still and stages that are away for long, with groups near their deadlines."""
    plan = random_plan(seed)
    plan.faults, plan.mtbf_ms, plan.fault_end_ms, plan.hold = ("stuck", "stage"), 2000, 150_000, False
    plan.task_ms, plan.scored, plan.group_deadline_s = 4000, False, 30.0
    return plan


def outage_plan(seed: int) -> Plan:
    """A broker that is away for 1 to 60 s again and again."""
    plan = random_plan(seed)
    plan.faults, plan.mtbf_ms, plan.fault_end_ms, plan.hold = ("outage",), 10_000, 150_000, False
    plan.task_ms, plan.prompts, plan.stage_crash, plan.skew = 4000, 36, 0.0, 0.0
    return plan


def hanging_plan(seed: int) -> Plan:
    """Episodes that hang or fail, and nothing else."""
    plan = random_plan(seed)
    plan.faults, plan.stage_crash, plan.fault_end_ms, plan.hold, plan.scored = (), 0.0, 0, False, False
    plan.hang, plan.flaky, plan.retries, plan.group_deadline_s = 0.1, 0.2, 0, 200.0
    return plan


def losing_plan(seed: int) -> Plan:
    """Workers that die again and again, and replicas that are given up with their first lease."""
    plan = hanging_plan(seed)
    plan.faults, plan.mtbf_ms, plan.fault_end_ms, plan.hang, plan.flaky = ("kill",), 1500, 150_000, 0.0, 0.0
    plan.max_lost_leases, plan.task_ms, plan.workers = 1, 2000, max(2, plan.workers)
    return plan


def rollback_plan(seed: int) -> Plan:
    """Trainers that go back to a checkpoint, discarding what was opened before, under ``wait``."""
    plan = tight_plan(seed)
    plan.faults, plan.mtbf_ms, plan.fault_end_ms, plan.discard = ("rollback",), 4000, 150_000, True
    for p in plan.policies:
        p.checkpoint_every = 1
    return plan


class World:
    """Time, topics, workers, trainers and faults of one plan."""

    def __init__(self, plan: Plan, stages: Mapping[str, StageFactory] | None = None) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.config = plan.config()
        made = dict(stages or flow.STAGES)
        if plan.scored and stages is None:
            made["assemble"] = lambda config, number: Assemble(config, number, frozenset(config.streams))
        elif stages is None:
            made["assemble"] = lambda config, number: Assemble(config, number)
        self.driver: Any = self.make_driver(made)
        self.driver.listeners.append(self._written)
        self.start_ms = self.driver.now_ms
        self.bad: list[str] = []
        """Violations that show while the run is played."""
        self.stats: Counter[str] = Counter()
        self.down_until = self.store_down_until = 0
        self.workers: list[Any] = []
        self.trainers: list[Any] = [self.make_trainer(i, p) for i, p in enumerate(plan.policies)]
        self.incarnations: Counter[str] = Counter()
        self.stuck: dict[tuple[str, int], tuple[tuple[str, int], int]] = {}
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._poked: dict[tuple[str, int], int] = {}
        self._down_tasks: dict[tuple[str, int], int] = {}
        self._readers: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for key, task in self.driver.tasks.items():
            for place in task.inputs:
                self._readers.setdefault(place, []).append(key)
        self._listeners: dict[tuple[str, int], list[Callable[[], None]]] = {}

    def make_driver(self, stages: Mapping[str, StageFactory]) -> Any:
        """What runs the stages and keeps the topics."""
        return TopologyDriver(self.config, stages)

    def make_worker(self, number: int) -> Any:
        """A rollout worker."""
        return Worker(self, number)

    def make_trainer(self, policy: int, plan: PolicyPlan) -> Any:
        """Who trains a policy."""
        return Trainer(self, policy, plan)

    # ------------------------------------------------------------------------------------------------ time

    @property
    def now(self) -> int:
        """Virtual milliseconds."""
        return self.driver.now_ms

    def at(self, delay: float, what: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now + max(0, round(delay)), next(self._numbers), what))

    def hop(self) -> float:
        """Milliseconds that a record takes from one process to the next."""
        return self.rng.uniform(5, 60)

    def listen(self, place: tuple[str, int], what: Callable[[], None]) -> None:
        """Call ``what`` a hop after each record in a place."""
        self._listeners.setdefault(place, []).append(what)

    def violation(self, text: str) -> None:
        """Note something that must not happen."""
        self.bad.append(f"t={(self.now - self.start_ms) / 1000:.2f} {text}")

    def play(self) -> World:
        """Run until every stage has finished or the time limit is reached."""
        self.begin()
        for key in self.driver.tasks:
            self._poke(key)
            self._tick(key)
        while self._events and self.now < self.start_ms + self.plan.limit_ms and not self.finished():
            when, _, what = heapq.heappop(self._events)
            self.driver.now_ms = max(when, self.now)
            what()
        return self

    def begin(self) -> None:
        """Start the source, workers, trainers and faults."""
        plan = self.plan
        self.at(100, self._publish)
        for n in range(plan.workers):
            self.at(self.rng.uniform(0, 500), lambda n=n: self.start_worker(n))
        for trainer in self.trainers:
            self.at(200, trainer.go_on)
        if plan.faults:
            self.at(2000, self._fault)
        if plan.hold:
            self.at(15_000, self.trainers[0].hold)

    def finished(self) -> bool:
        """True when every stage says so."""
        return all(task.stage_is_over() for task in self.driver.tasks.values())

    # ------------------------------------------------------------------------------------------------ stages

    def _written(self, place: tuple[str, int]) -> None:
        for key in self._readers.get(place, ()):
            self._poke(key)
        for what in self._listeners.get(place, ()):
            self.at(self.hop(), what)

    def _poke(self, key: tuple[str, int]) -> None:
        if key not in self._poked:
            self._poked[key] = 1
            self.at(self.hop(), lambda: self._turn(key))

    def _tick(self, key: tuple[str, int]) -> None:
        self._poke(key)
        self.at(1000, lambda: self._tick(key))

    def _turn(self, key: tuple[str, int]) -> None:
        if self.now < self.down_until:
            self.at(self.down_until - self.now + self.hop(), lambda: self._turn(key))
            return
        self._poked.pop(key, None)
        if self._down_tasks.get(key, 0) > self.now or self.driver.tasks[key].stage_is_over():
            return
        faulty = self.now < self.start_ms + self.plan.fault_end_ms
        crash = "none"
        if faulty and self.rng.random() < self.plan.stage_crash:
            crash = self.rng.choice(["before_commit", "after_commit"])
        self.driver.turn(*key, read=lambda place, waiting: self._prefix(key, place, waiting), crash=crash)
        if crash != "none":
            self.crash_stage(key, self.rng.uniform(500, 9000))
        elif self.driver.behind(*key):
            self._poke(key)

    def _prefix(self, key: tuple[str, int], place: tuple[str, int], waiting: int) -> int:
        stuck = self.stuck.get(key)
        if stuck is not None and stuck[0] == place and stuck[1] > self.now:
            return 0
        if waiting and self.rng.random() < self.plan.skew:
            return self.rng.randint(0, waiting)
        return waiting

    def crash_stage(self, key: tuple[str, int], down_ms: float) -> None:
        """A stage dies and is back after ``down_ms``."""
        self.stats["stage crashes"] += 1
        self.driver.crash(*key)
        self._down_tasks[key] = self.now + round(down_ms)
        self.at(down_ms + 1, lambda: self._poke(key))

    # ------------------------------------------------------------------------------------------------ source

    def _publish(self, position: int = 0) -> None:
        if self.now < self.down_until:
            self.at(self.down_until - self.now + 500, lambda: self._publish(position))
            return
        if position == 0:
            for n in range(self.plan.heldout):
                self.driver.append("prompts", prompt(n, "@eval"))
        more = min(self.rng.randint(1, 9), self.plan.prompts - position)
        for n in range(position, position + more):
            self.driver.append("prompts", prompt(n, "main"))
        if more <= 0:
            self.driver.append("prompts", End(reason="epochs", count=position, stream="main"))
        else:
            self.at(self.rng.uniform(50, 500), lambda: self._publish(position + more))

    # ------------------------------------------------------------------------------------------------ workers

    def start_worker(self, number: int) -> None:
        """A new incarnation of a worker."""
        self.workers.append(self.make_worker(number))

    # ------------------------------------------------------------------------------------------------ faults

    def _fault(self) -> None:
        plan, rng = self.plan, self.rng
        if self.now > self.start_ms + plan.fault_end_ms:
            return
        self.at(rng.expovariate(1 / plan.mtbf_ms), self._fault)
        what = rng.choice(plan.faults)
        self.stats[f"fault {what}"] += 1
        getattr(self, f"fault_{what}")([w for w in self.workers if w.alive])

    def fault_kill(self, live: list[Worker]) -> None:
        """A worker dies and is started again."""
        if live:
            worker = self.rng.choice(live)
            worker.die()
            self.at(self.rng.uniform(500, 15_000), lambda: self.start_worker(worker.number))

    def fault_freeze(self, live: list[Worker]) -> None:
        """A worker stands still."""
        if live:
            self.rng.choice(live).freeze(self.rng.uniform(3000, 40_000))

    def fault_twin(self, live: list[Worker]) -> None:
        """A worker is slow, is taken for dead, and is started a second time."""
        if live:
            worker = self.rng.choice(live)
            worker.freeze(self.rng.uniform(0, 20_000))
            self.start_worker(worker.number)

    def fault_all_workers(self, live: list[Worker]) -> None:
        """Every worker dies, and they are back one by one."""
        for worker in live:
            worker.die()
        for number in range(self.plan.workers):
            self.at(self.rng.uniform(20_000, 90_000), lambda number=number: self.start_worker(number))

    def fault_stage(self, _live: list[Worker]) -> None:
        """A stage dies, for up to longer than a group may take."""
        self.crash_stage(self.rng.choice(list(self.driver.tasks)), self.rng.choice([2000, 8000, 25_000, 110_000]))

    def fault_stuck(self, _live: list[Worker]) -> None:
        """One input of a stage cannot be read for a while."""
        key = self.rng.choice(list(self.driver.tasks))
        place = self.rng.choice(self.driver.tasks[key].inputs)
        self.stuck[key] = (place, self.now + self.rng.choice([2000, 8000, 30_000]))
        self.at(self.stuck[key][1] - self.now + 10, lambda: self._poke(key))

    def fault_outage(self, _live: list[Worker]) -> None:
        """The broker is away."""
        self.down_until = max(self.down_until, self.now + self.rng.choice([1000, 5000, 15_000, 60_000]))
        self.driver.reachable_since_ms = self.down_until

    def fault_rollback(self, _live: list[Worker]) -> None:
        """A trainer goes back to a checkpoint."""
        self.rng.choice(self.trainers).roll_back(self.rng.random())

    def fault_trainer(self, _live: list[Worker]) -> None:
        """A trainer stands still."""
        self.rng.choice(self.trainers).pause(self.rng.uniform(500, 20_000))


def prompt(number: int, stream: str) -> Prompt:
    """The n-th prompt of a stream."""
    return Prompt(
        prompt_id=f"{stream[:5]}{number:04d}",
        stream=stream,
        dataset="none",
        row=number,
        epoch=0,
        position=number,
        prompt="?",
        answer="!",
        reward="exact_match",
    )


class Worker:
    """One incarnation of a rollout worker: reads its inbox, holds tasks, reports, sends Demand (protocol 5)."""

    ignores_incarnation = False

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.name = f"worker-{number}"
        world.incarnations[self.name] += 1
        self.incarnation = world.incarnations[self.name]
        self.speed = world.plan.speeds[number % len(world.plan.speeds)]
        self.capacity = world.plan.slots + 1
        self.alive, self.frozen_until, self.thawed_ms, self.died_ms = True, 0, 0, 0
        self.inbox = inbox_of(self.name, world.config.run.inboxes)
        self.loaded: dict[int, int] = {}
        self.held: dict[tuple[str, int, int, int], Task] = {}
        self.running: dict[tuple[str, int, int, int], dict[int, int]] = {}
        self.reported: set[tuple[str, int, int, int]] = set()
        self.next_sequence = 0
        self.position = -1
        self._demand_due = False
        self.later(world.rng.uniform(100, 1000), self.boot)

    def later(self, delay: float, what: Callable[[], None]) -> None:
        """Do something later unless this incarnation has died; a frozen one does it when it thaws."""

        def fire() -> None:
            if not self.alive:
                return
            if self.world.now < self.frozen_until:
                self.world.at(self.frozen_until - self.world.now, fire)
                return
            what()

        self.world.at(delay, fire)

    def die(self) -> None:
        """End without a trace."""
        if self.alive:
            self.alive, self.died_ms = False, self.world.now

    def freeze(self, milliseconds: float) -> None:
        """Do nothing for a while."""
        self.frozen_until = max(self.frozen_until, self.world.now + round(milliseconds))
        self.thawed_ms = self.frozen_until

    def boot(self) -> None:
        """Load the heads, take the inbox end, look for the end mark, send the first Demand."""
        world = self.world
        if world.now < max(world.down_until, world.store_down_until):
            self.later(500, self.boot)
            return
        self.loaded = {t.policy: t.head for t in world.trainers}
        self.position = len(world.driver.log["tasks", self.inbox])
        world.listen(("tasks", self.inbox), lambda: self.later(0, self.read))
        if world.driver.log["run", 0]:
            self.die()
            return
        self.beat()

    def beat(self) -> None:
        """Send Demand every 2 s."""
        self.demand()
        self.later(2000, self.beat)

    def demand(self) -> None:
        """Send Demand soon, at most every 50 ms."""
        if not self._demand_due:
            self._demand_due = True
            self.later(50, self.send)

    def send(self) -> None:
        """Write the snapshot."""
        world = self.world
        if world.now < world.down_until:
            self.later(world.down_until - world.now + world.hop(), self.send)
            return
        self._demand_due = False
        held = [HeldTask(kind=k, group=g, replica=r, attempt=a) for k, g, r, a in self.held]
        hosted = [HostedPolicy(policy=p, version=v) for p, v in self.loaded.items()]
        record = Demand(
            worker=self.name,
            incarnation=self.incarnation,
            role="any",
            capacity=self.capacity,
            sent_ms=world.now,
            next_sequence=self.next_sequence,
            inbox=self.inbox,
            policies=hosted,
            held=held,
        )
        world.driver.append("demand", record)

    def load(self, policy: int) -> None:
        """A newer version is announced."""
        if not self.loaded:
            return
        head = self.world.trainers[policy].head
        if head > self.loaded[policy]:
            self.loaded[policy] = head
            self.demand()
            self.fill()

    def read(self) -> None:
        """Read the inbox to its end."""
        world = self.world
        if world.now < world.down_until:
            self.later(world.down_until - world.now + world.hop(), self.read)
            return
        log = world.driver.log["tasks", self.inbox]
        for entry in log[self.position :]:
            record = entry.record
            if isinstance(record, Stop):
                self.die()
                return
            if isinstance(record, Task) and record.worker == self.name:
                if record.incarnation == self.incarnation or self.ignores_incarnation:
                    key = (record.kind, record.group, record.replica, record.attempt)
                    self.held[key] = record
                    self.next_sequence = record.sequence + 1
                    self.later(max(0, record.deadline_ms - world.now), lambda key=key: self.finish(key, failed=True))
            elif isinstance(record, Cancel) and record.worker == self.name and record.incarnation == self.incarnation:
                self.release((record.kind, record.group, record.replica, record.attempt))
        self.position = len(log)
        if len(self.held) > self.capacity:
            world.violation(f"{self.name} holds {len(self.held)} tasks, its capacity is {self.capacity}")
        self.fill()

    def fill(self) -> None:
        """Start held tasks while there are slots and the versions allow it."""
        world, plan = self.world, self.world.plan
        for key, task in list(self.held.items()):
            if len(self.running) >= plan.slots:
                return
            if key in self.running or any(self.loaded[b.policy] < b.min_version for b in task.policies):
                continue
            self.running[key] = dict(self.loaded)
            x = world.rng.random()
            if x >= plan.hang:
                took = world.rng.expovariate(1) * plan.task_ms / self.speed
                self.later(took, lambda key=key, bad=x > 1 - plan.flaky: self.finish(key, failed=bad))

    def finish(self, key: tuple[str, int, int, int], *, failed: bool, done_ms: int = -1) -> None:
        """Write the result, wait for the acknowledgement, then let the task go."""
        world = self.world
        if key not in self.held or (key in self.reported and done_ms < 0):
            return
        self.reported.add(key)
        done_ms = world.now if done_ms < 0 else done_ms
        if world.now < world.down_until:
            self.later(
                world.down_until - world.now + world.hop(), lambda: self.finish(key, failed=failed, done_ms=done_ms)
            )
            return
        task = self.held[key]
        versions = self.running.get(key)
        world.stats["tasks done"] += 1
        if versions is not None:
            for bound in task.policies:
                if versions[bound.policy] < bound.min_version:
                    world.violation(f"{key} sampled below its min version")
        self._report(task, versions, failed or versions is None, done_ms)
        self.later(world.hop() / 2, lambda: self.release(key))

    def release(self, key: tuple[str, int, int, int]) -> None:
        """Hold a task no more."""
        if self.held.pop(key, None) is not None:
            self.running.pop(key, None)
            self.demand()
            self.fill()

    def _report(self, task: Task, versions: dict[int, int] | None, failed: bool, done_ms: int) -> None:
        driver = self.world.driver
        partition = group_partition(task.group, self.world.config.run.group_partitions)
        if task.kind == "train":
            record = trajectory(self.world, task, self, None if failed else versions, done_ms)
            driver.append("trajectories", record, partition=partition)
        elif task.kind == "score":
            scores = [MemberScore(replica=r, name="judge", value=0.0) for r in range(self.world.plan.group_size)]
            driver.append(
                "trajectories",
                Score(group=task.group, worker=self.name, finished_ms=done_ms, scores=scores),
                partition=partition,
            )
        else:
            bound = task.policies[0]
            versions = versions or {bound.policy: bound.min_version}
            driver.append(
                "evals",
                EvalResult(
                    policy=bound.policy,
                    suite="heldout",
                    prompt_id=task.prompt.prompt_id,
                    replica=task.replica,
                    version=bound.min_version,
                    oldest_version=versions[bound.policy],
                    newest_version=versions[bound.policy],
                    reward=0.0,
                    tokens=0,
                    end_reason="stop",
                    finished_ms=done_ms,
                ),
            )


def trajectory(world: World, task: Task, worker: Worker, versions: dict[int, int] | None, done_ms: int) -> Trajectory:
    """The result of a task; ``versions`` None: an excluded one."""
    sequences = []
    draw = random.Random(f"{world.plan.seed} {task.group}")
    equal = draw.random() < world.plan.zero_variance
    value = 1.0 if equal else float(task.replica % 2)
    if versions is not None:
        silent = random.Random(f"silent {world.plan.seed} {task.group}").random() < world.plan.silent
        for bound in task.policies:
            if silent and bound.policy == 1:
                continue
            oldest = versions[bound.policy]
            newest = max(oldest, worker.loaded[bound.policy])
            sequences.append(
                Sequence(
                    policy=bound.policy,
                    role="policy",
                    prompt_length=1,
                    end_reason="stop",
                    oldest_version=oldest,
                    newest_version=newest,
                    tokens=np.array([1, 2, 3], "int32"),
                    logprobs=np.array([0, -1, -1], "float32"),
                    mask=np.array([0, 1, 1], "uint8"),
                    versions=np.array([-1, oldest, newest], "int32"),
                )
            )
    failed = versions is None
    return Trajectory(
        group=task.group,
        replica=task.replica,
        attempt=task.attempt,
        worker=worker.name,
        incarnation=worker.incarnation,
        stream=task.stream,
        prompt_id=task.prompt.prompt_id,
        status="excluded" if failed else "train",
        end_reason="env_error" if failed else "stop",
        reward=value,
        tokens=2,
        started_ms=task.issued_ms,
        finished_ms=done_ms,
        error="it failed" if failed else "",
        rewards=[Reward(name="exact_match", value=value)],
        sequences=sequences,
    )


class Trainer:
    """A toy trainer: turns Manifests into Steps, can stand still, and can roll back to a checkpoint (protocol 8)."""

    def __init__(self, world: World, policy: int, plan: PolicyPlan) -> None:
        self.world, self.policy, self.plan = world, policy, plan
        self.head = self.batch = self.lineage = 0
        self.versions: dict[int, int] = {0: 0}
        """Batch by version."""
        self.history: list[int] = []
        """Batches that made the weights in force, in order."""
        self.checkpoints: list[tuple[int, int]] = [(0, 0)]
        """(lineage, batch)."""
        self.stopped = self.held = self.busy = False
        self.paused_until = 0
        self._generation = 0

    def later(self, delay: float, what: Callable[[], None]) -> None:
        """Do something later unless a rollback came between."""
        generation = self._generation

        def fire() -> None:
            if generation != self._generation or self.held:
                return
            wait = max(self.paused_until, self.world.down_until) - self.world.now
            if wait > 0:
                self.world.at(wait + self.world.hop(), fire)
            else:
                what()

        self.world.at(delay, fire)

    def pause(self, milliseconds: float) -> None:
        """Stand still."""
        self.paused_until = self.world.now + round(milliseconds)

    def hold(self) -> None:
        """Stand still until the other policy has trained all its data; then go on."""
        self.held, self._generation, self.busy = True, self._generation + 1, False
        other = self.world.trainers[1]

        def back() -> None:
            late = self.world.now > self.world.start_ms + self.world.plan.limit_ms / 2
            if self.world.plan.pacing == "any" and not other.stopped and not late:
                self.world.at(2000, back)
                return
            if late:
                self.world.violation("policy 1 does not finish while the trainer of policy 0 stands")
            self.held = False
            self.go_on()

        self.world.at(60_000, back)

    def go_on(self) -> None:
        """Look for the next Manifest now and a hop after every later one."""
        self.world.listen(("manifests", self.policy), lambda: self.later(0, self.look))
        self.later(0, self.look)

    def look(self) -> None:
        """Start on the next batch when its Manifest is there; stop at the end."""
        if self.busy or self.stopped:
            return
        log = self.world.driver.records("manifests", self.policy)
        if self.plan.frozen:
            self.stop("frozen")
        elif self.plan.max_steps and self.batch >= self.plan.max_steps:
            self.stop("steps")
        elif len(log) > self.batch:
            manifest = log[self.batch]
            if isinstance(manifest, Manifest):
                self.busy = True
                self.later(self.world.rng.uniform(0.8, 1.2) * self.plan.step_ms, self.trained)
            else:
                self.stop("data")

    def trained(self) -> None:
        """A batch has been trained: checkpoint when due, publish."""
        self.batch += 1
        self.history.append(self.batch)
        if self.batch % self.plan.checkpoint_every == 0:
            self.checkpoints.append((self.lineage, self.batch))
        self.later(self.world.rng.uniform(*self.world.plan.publish_ms), lambda: self.publish(resumed=False))

    def publish(self, *, resumed: bool) -> None:
        """Commit the weights, then write Step (or Resumed)."""
        self.head += 1
        self.versions[self.head] = self.batch
        for worker in self.world.workers:
            if worker.alive:
                worker.later(self.world.rng.uniform(*self.world.plan.load_ms), lambda w=worker: w.load(self.policy))
        self.later(self.world.rng.uniform(5, 50), lambda: self.step(resumed))

    def step(self, resumed: bool) -> None:
        """Write the Step or Resumed of the head."""
        driver = self.world.driver
        if resumed:
            record: Step | Resumed = Resumed(
                policy=self.policy,
                lineage=self.lineage,
                batch=self.batch,
                version=self.head,
                discard=self.world.plan.discard,
            )
        else:
            record = Step(
                policy=self.policy,
                batch=self.batch,
                version=self.head,
                lineage=self.lineage,
                updates=1,
                loss=0.0,
                tokens=0,
                sequences=0,
                wait_seconds=0,
                step_seconds=0,
                publish_seconds=0,
                delta_bytes=0,
                changed_share=0,
                finished_ms=self.world.now,
            )
        driver.append("steps", record, partition=self.policy)
        self.busy = False
        self.later(1, self.look)

    def roll_back(self, share: float) -> None:
        """Go back to a checkpoint (``--resume --from V``); the decision is a record, then the weights, then Resumed."""
        if self.stopped or self.held:
            return
        self._generation += 1
        if self.world.now < max(self.world.down_until, self.paused_until):
            self._generation -= 1
            return
        self.world.stats["rollbacks"] += 1
        candidates = [b for lineage, b in self.checkpoints if lineage == self.lineage and b <= share * self.batch]
        base = max(candidates, default=min(b for _, b in self.checkpoints))
        self.world.driver.append(
            "steps",
            Rollback(
                policy=self.policy,
                lineage=self.lineage + 1,
                base_lineage=self.lineage,
                base_batch=base,
                base_version=max(v for v, b in self.versions.items() if b == base),
            ),
            partition=self.policy,
        )
        self.lineage += 1
        self.checkpoints.append((self.lineage, base))
        self.batch, self.history, self.busy = base, self.history[:base], True
        self.later(self.world.rng.uniform(100, 500), lambda: self.publish(resumed=True))

    def stop(self, reason: str) -> None:
        """Write Stop."""
        self.stopped = True
        self.world.driver.append("steps", Stop(reason=reason, policy=self.policy), partition=self.policy)
