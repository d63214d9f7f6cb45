"""A run in virtual time on a simulated cluster: real operator workers over the broker's state machines.

``ClusterWorld`` is a ``flow_world.World`` whose stages run in ``runtime.worker.Worker`` processes, with their clients,
transactions, groups and changelogs; sources, rollout workers and trainers write from outside. Its own faults are those
of processes and of the broker.
"""

from __future__ import annotations

import random
import sys
import time as real_time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from flow_check import violations
from flow_world import Plan, PolicyPlan, World
from sim_cluster import SimCluster, SimConnection, cheap_checksums
from sim_store import Objects, SimStore
from sim_time import Killed, SimProcess, SimStop, SimTime, SimWatchdog, virtual_time

from headrace.connectors import kafka, transaction
from headrace.pipeline.runtime import task
from headrace.pipeline.runtime.assignment import input_places
from headrace.pipeline.runtime.driver import Entry
from headrace.pipeline.runtime.stage import StageFactory
from headrace.pipeline.runtime.worker import Worker
from headrace.schemas import codec
from headrace.schemas.codec import headers_of
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import Superseded
from headrace.schemas.records import Record
from headrace.schemas.topics import partition_counts

Place = tuple[str, int]
RUNTIME = "headrace.pipeline.runtime."


def timed_modules() -> list[ModuleType]:
    """The modules of the runtime and of its connector that look at the clock."""
    runtime = [module for name, module in sorted(sys.modules.items()) if name.startswith(RUNTIME)]
    return [m for m in (kafka, transaction, *runtime) if getattr(m, "time", None) is real_time]


@dataclass(kw_only=True)
class ClusterPlan(Plan):
    """A run on a cluster: who runs the stages, and when a process dies between two effects."""

    members: int = 1
    """Instances of every sub-topology."""
    latency: tuple[float, float] = (0.0005, 0.004)
    kill_steps: dict[str, int] = field(default_factory=dict)
    """Process (``stage.instance`` or ``trainer.policy``) to the client call at which the first of its name dies."""
    real_workers: bool = False
    """Rollout workers are the real ones with the scripted engine; they need the real trainer's weights."""
    late_worker: bool = False
    """A rollout worker is started when the run has ended."""
    put_s: tuple[float, float] = (0.005, 0.1)
    """Seconds of a call of the object store."""
    folder: str = ""
    """Where checkpoints go: the real trainer trains, with a toy step. Empty: a scripted one."""

    def settings(self) -> dict[str, Any]:
        """What ``run.toml`` would say."""
        out = super().settings()
        if self.real_workers:
            out["rollout"] |= {"engine": "scripted", "slots": self.slots, "poll_seconds": 2.0}
            out["rollout"]["options"] = {"step_seconds": self.task_ms / 8000, "mean_length": 8}
        if self.folder:
            out["run"]["folder"] = self.folder
            for policy, plan in zip(out["policies"].values(), self.policies, strict=True):
                policy["trainer"] |= {"checkpoint_every": plan.checkpoint_every, "checkpoint_beside": False}
        return out


class ClusterDriver:
    """The topics of a simulated cluster, as ``TopologyDriver`` shows its own, and the operators that run."""

    def __init__(self, plan: ClusterPlan, config: RunConfig, stages: Mapping[str, StageFactory]) -> None:
        self.config, self.stages, self.plan = config, stages, plan
        self.time = SimTime()
        sizes = config.run
        self.partitions = partition_counts(
            config.policy_names(), groups=sizes.group_partitions, inboxes=sizes.inboxes, lanes=sizes.lanes
        )
        self.cluster = SimCluster(
            self.time, config.run.id, self.partitions, seed=plan.seed, latency=plan.latency
        )  # fmt: skip
        self.log: dict[Place, list[Entry]] = defaultdict(list)
        self.listeners: list[Callable[[Place], None]] = []
        self.dead_letters: list[tuple[Place, str]] = []
        self.replayed: dict[Place, dict[bytes, bytes]] = {}
        """What the committed records of each changelog partition add up to."""
        self.last_writer: dict[Place, tuple[int, int]] = {}
        self.bad: list[str] = []
        self._next: dict[Place, int] = defaultdict(int)
        for view in self.cluster.views.values():
            view.listeners.append(self._observe)
        self.tasks: dict[Place, Any] = {}
        for sub in stages:
            for number in range(plan.members):
                operator = Operator(self, sub, f"w{number}")
                self.tasks[sub, number] = operator
                operator.start()

    @property
    def now_ms(self) -> int:
        """Virtual milliseconds."""
        return self.time.wall_ms()

    def append(self, topic: str, record: Record, *, partition: int = 0, key: bytes | None = None) -> int:
        """Write a record from outside, at once."""
        headers = [(name, value) for name, value in headers_of(record, self.config.run.id, "test")]
        return self.cluster.append((topic, partition), key, codec.encode(record), headers)

    def records(self, topic: str, partition: int | None = None) -> list[Record]:
        """Committed records of a topic."""
        numbers = range(self.partitions[topic]) if partition is None else (partition,)
        return [entry.record for number in numbers for entry in self.log[topic, number]]

    def _observe(self, place: Place) -> None:
        for entry in self.cluster.committed(place, self._next[place]):
            self._next[place] = entry.offset + 1
            self.last_writer[place] = entry.producer
            if place[0].endswith("-changelog"):
                replayed = self.replayed.setdefault(place, {})
                assert entry.key is not None
                if entry.value is None:
                    replayed.pop(entry.key, None)
                else:
                    replayed[entry.key] = entry.value
            elif place[0] == "dead-letters":
                reason = dict(entry.headers).get("__streams.errors.stacktrace") or b""
                self.dead_letters.append((place, reason.decode()))
            else:
                record = codec.decode(entry.value, entry.headers)
                self.log[place].append(Entry(entry.timestamp_ms, record, entry.key, entry.value or b""))
                for listener in self.listeners:
                    listener(place)

    def compare(self, task: task.Task, producer: tuple[int, int]) -> None:
        """A task of a producer (id, epoch) has committed: its stores are what a replay of their changelogs gives.

        It may hear of its commit late, when a successor has written since; then there is nothing to compare.
        """
        for name, topic in task.changelogs().items():
            place = (topic, task.number)
            log = self.cluster.views[place].log
            if self.last_writer.get(place) != producer or log.last_stable_offset < log.end:
                continue  # while another's transaction is open (a sweep), nobody can read what was committed after it
            store, replayed = dict(task.stores[name].scan(b"")), self.replayed.get(place, {})
            if store != replayed:
                keys = {key for key in store.keys() | replayed.keys() if store.get(key) != replayed.get(key)}
                self.bad.append(f"store: {place} differs from its changelog in {sorted(keys)[:3]}")


class Operator:
    """An instance of a sub-topology that a launcher keeps alive."""

    def __init__(self, driver: ClusterDriver, sub: str, instance: str) -> None:
        self.driver, self.sub, self.instance = driver, sub, instance
        self.name = f"{sub}.{instance}"
        self.inputs = input_places(sub, driver.partitions)
        self.processes: list[SimProcess] = []
        self.over = self.away = self.gone = False
        """Its worker has come to the end of the run; its launcher is down with it for a while; it left for good."""
        self.stop = SimStop(driver.time)

    def stage_is_over(self) -> bool:
        """Its worker has come to the end of the run, or it left for good."""
        return self.over or self.gone

    def start(self) -> SimProcess | None:
        """A new process of this instance."""
        if self.over or self.away or self.gone:
            return None
        driver = self.driver
        self.stop = stop = SimStop(driver.time)

        def main() -> None:
            connection = SimConnection(driver.cluster).patient(stop.is_set)
            Worker(
                connection, driver.config, self.sub, self.instance, driver.stages[self.sub], stop=stop,
                watchdog=SimWatchdog(connection.answers), clock=driver.time.wall_ms,
            ).run()  # fmt: skip
            self.over = self.over or not stop.is_set()

        process = SimProcess(driver.time, self.name, main, self._ended)
        if not self.processes:
            process.kill_at = driver.plan.kill_steps.get(self.name, -1)
        self.processes.append(process)
        return process

    def _ended(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Killed | Superseded):
            self.driver.bad.append(f"died: {self.name}: {type(error).__name__}: {error}")
        newest = self.processes[-1]
        if error is not None and newest.ended and not (self.over or self.away or self.gone):
            self.driver.time.at(random.Random(len(self.processes)).uniform(0.2, 3.0), self._again)

    def _again(self) -> None:
        if self.processes[-1].ended:
            self.start()

    def kill(self, down_ms: float) -> None:
        """kill -9; the launcher is back with it after so long."""
        alive = [p for p in self.processes if p.alive]
        if not alive:
            return
        for process in alive:
            process.kill()
        if down_ms > 3000:
            self.away = True
            self.driver.time.at(down_ms / 1000, self._back)

    def _back(self) -> None:
        if self.away:
            self.away = False
            self.start()

    def twin(self, seconds: float) -> None:
        """It is slow, taken for dead, and started a second time."""
        if self.processes[-1].alive:
            self.processes[-1].freeze(seconds)
            self.start()

    def leave(self) -> None:
        """Stop in order, for good."""
        self.gone = True
        self.stop.set("scale in")


class ClusterWorld(World):
    """See the module."""

    plan: ClusterPlan

    def __init__(self, plan: ClusterPlan, stages: Mapping[str, StageFactory] | None = None) -> None:
        self.objects = Objects()
        super().__init__(plan, stages)

    def make_trainer(self, policy: int, plan: PolicyPlan) -> Any:
        """The real one when there is a folder for its checkpoints."""
        if not self.plan.folder:
            return super().make_trainer(policy, plan)
        from sim_trainer import RealTrainer

        return RealTrainer(self, policy, plan)

    def make_worker(self, number: int) -> Any:
        """The real one when the plan says so."""
        if not self.plan.real_workers:
            return super().make_worker(number)
        from sim_rollout import RealWorker

        return RealWorker(self, number)

    def begin(self) -> None:
        """Start everybody."""
        if self.plan.real_workers:
            from sim_rollout import run_manifest

            self.driver.append("run", run_manifest(self), key=b"manifest")
        super().begin()

    def violations(self) -> list[str]:
        """Every breach of an invariant, of topics, stores and weights."""
        bad = violations(self)
        if self.plan.folder:
            from sim_trainer import trainer_violations

            for trainer in self.trainers:
                bad += trainer_violations(trainer, self.finished())
        return bad

    def make_driver(self, stages: Mapping[str, StageFactory]) -> ClusterDriver:
        """Real workers on a simulated cluster."""
        driver = ClusterDriver(self.plan, self.config, stages)
        self.store = SimStore(driver.time, self.objects, lambda: driver.cluster.rng.uniform(*self.plan.put_s))
        return driver

    def at(self, delay: float, what: Callable[[], None]) -> None:
        """Do something later."""
        self.driver.time.at(delay / 1000, what)

    def _poke(self, key: Place) -> None:
        """Nothing to do: workers wake by themselves."""

    def play(self) -> ClusterWorld:
        """Run until every operator has come to the end of the run."""
        with self.in_virtual_time():
            self.begin()
            self.driver.time.run(self.finished, self.plan.limit_ms / 1000)
            if self.plan.real_workers and self.finished():
                self._let_workers_end()
            self.driver.time.close()
        self.bad += self.driver.bad
        return self

    def _let_workers_end(self) -> None:
        """When everything has ended, so do the rollout workers, those too that come late."""
        if self.plan.late_worker:
            self.start_worker(0)

        def ended() -> bool:
            return not any(worker.alive for worker in self.workers)

        if not self.driver.time.run(ended, 120):
            waiting = sorted(worker.name for worker in self.workers if worker.alive)
            self.violation(f"not ended: {', '.join(waiting)} still wait 120 s after the run")

    @contextmanager
    def in_virtual_time(self) -> Iterator[None]:
        """Clocks, checksums and the comparison of stores."""
        commit = task.Task.commit

        def compared(committed: task.Task) -> None:
            commit(committed)
            transaction = committed._sink.__self__._transaction  # type: ignore[attr-defined]
            producer = transaction._producer
            self.driver.compare(committed, (producer.producer_id, producer.epoch))

        with ExitStack() as stack:
            stack.enter_context(cheap_checksums())
            stack.enter_context(virtual_time(self.driver.time, timed_modules()))
            if self.plan.folder:
                import sim_trainer

                stack.enter_context(sim_trainer.toy_parts(self.driver.time))
                stack.enter_context(virtual_time(self.driver.time, sim_trainer.MODULES))
            if self.plan.real_workers:
                import sim_rollout

                stack.enter_context(sim_rollout.rollout_parts(self))
            task.Task.commit = compared  # type: ignore[method-assign]
            stack.callback(setattr, task.Task, "commit", commit)
            yield

    # faults

    def crash_stage(self, key: Place, down_ms: float) -> None:
        """An operator is killed."""
        self.stats["stage crashes"] += 1
        self.driver.tasks[key].kill(down_ms)

    def fault_stuck(self, _live: Any) -> None:
        """One input of one operator cannot be fetched for a while."""
        operator = self.rng.choice(list(self.driver.tasks.values()))
        until = self.driver.time.now + self.rng.choice([2, 8, 30])
        self.driver.cluster.stuck[operator.name, self.rng.choice(operator.inputs)] = until

    def fault_outage(self, live: Any) -> None:
        """The broker stands still, or is killed and started again."""
        super().fault_outage(live)
        seconds = (self.down_until - self.now) / 1000
        if self.rng.random() < 0.5:
            self.driver.cluster.kill(seconds)
        else:
            self.driver.cluster.stop_for(seconds)

    def fault_store(self, _live: Any) -> None:
        """The object store is away."""
        until = self.driver.time.now + self.rng.choice([1, 5, 20])
        self.store.down_until = max(self.store.down_until, until)
        self.store_down_until = self.start_ms + round((self.store.down_until - 1000) * 1000)

    def fault_trainer(self, live: Any) -> None:
        """A trainer dies in its next calls, or stands still."""
        if self.plan.folder and self.rng.random() < 0.7:
            self.rng.choice(self.trainers).die_soon()
        else:
            super().fault_trainer(live)

    def fault_zombie(self, _live: Any) -> None:
        """A trainer stands still and has a successor."""
        self.rng.choice(self.trainers).zombie()

    def fault_overlap(self, _live: Any) -> None:
        """A trainer has a successor while it works."""
        self.rng.choice(self.trainers).overlap()

    def fault_operator_freeze(self, _live: Any) -> None:
        """An operator stands still, for up to longer than its transaction and its session may last."""
        process = self.rng.choice([o.processes[-1] for o in self.driver.tasks.values()])
        process.freeze(self.rng.choice([1, 5, 15, 40]))

    def fault_operator_twin(self, _live: Any) -> None:
        """An operator is slow and has a successor."""
        self.rng.choice(list(self.driver.tasks.values())).twin(self.rng.uniform(0, 20))
