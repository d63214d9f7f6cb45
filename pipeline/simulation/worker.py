"""A rollout worker in virtual time: takes tasks, plays episodes on its engines, reports, asks for more (protocol 5).

It follows what ``task_to_trajectory`` does: every held task is played at once, a generation starts when the weights are
new enough, a cancelled task leaves the engine, a task is let go when its result is acknowledged.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from headrace.pipeline.simulation.draws import GroupDraw
from headrace.pipeline.simulation.engine import FlowEngine
from headrace.schemas.parts import HeldTask, HostedPolicy, Sequence
from headrace.schemas.records import Cancel, Demand, Task, Trajectory

if TYPE_CHECKING:
    from headrace.pipeline.simulation.world import World

__all__ = ("Worker",)

_ANNOUNCE_SECONDS = 0.05
"""Least time between two Demand records."""

Key = tuple[str, int, int, int]

_TOKENS = np.array([1, 2], "int32")
_LOGPROBS = np.array([0.0, -1.0], "float32")
_MASK = np.array([0, 1], "uint8")


@dataclass(slots=True)
class _Episode:
    """A held task on its way."""

    task: Task
    view: HeldTask
    draw: GroupDraw
    turn: int = 0
    ended: bool = False
    oldest: dict[int, int] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    running: tuple[int, int] | None = None
    """Policy and number of the sequence in the engine."""
    early: bool = False
    """It waits for newer weights."""
    started: float = 0.0


class Worker:
    """One worker with an engine for each policy."""

    def __init__(self, world: "World", number: int) -> None:
        machines = world.plan.machines
        self.name = f"rollout-{number}"
        self.alive = True
        self.leaving = False
        self.engines = [
            FlowEngine(
                world.clock, slots=machines.slots, step_seconds=machines.step_seconds,
                row_seconds=machines.row_seconds, speed=machines.speeds[number % len(machines.speeds)],
            )
            for _ in range(world.plan.flow.policies)
        ]  # fmt: skip
        self.versions = [trainer.version for trainer in world.trainers]
        self.reported = 0
        self.held_seconds = 0.0
        """Tasks held, integrated over time."""
        self._world = world
        self._capacity = world.plan.capacity()
        self._held: dict[Key, _Episode] = {}
        self._next_sequence = 0
        self._sent = -1.0
        self._due = False
        self._seen = world.clock.now
        self._turn_policies = world.plan.work.policies
        self.demand()
        self._beat()

    @property
    def held(self) -> int:
        """Tasks held at this moment."""
        return len(self._held)

    # ------------------------------------------------------------------------------------------------ demand

    def demand(self) -> None:
        """Send Demand now, or as soon as the last one is old enough."""
        if self._due or not self.alive:
            return
        self._due = True
        self._world.clock.after(self._sent + _ANNOUNCE_SECONDS - self._world.clock.now, self._send)

    def _beat(self) -> None:
        if self.alive:
            self.demand()
            self._world.clock.after(self._world.config.rollout.heartbeat_seconds, self._beat)

    def _send(self) -> None:
        self._due, self._sent = False, self._world.clock.now
        if not self.alive:
            return
        hosted = [HostedPolicy(policy=p, version=v) for p, v in enumerate(self.versions)]
        self._say(1, 0 if self.leaving else self._capacity, hosted)

    def _say(self, incarnation: int, capacity: int, hosted: list[HostedPolicy]) -> None:
        record = Demand(
            worker=self.name, incarnation=incarnation, role="any", capacity=capacity,
            sent_ms=self._world.driver.now_ms, next_sequence=self._next_sequence, inbox=0, policies=hosted,
            held=[episode.view for episode in self._held.values()],
        )  # fmt: skip
        self._world.write("demand", record)

    def leave(self) -> None:
        """Take nothing more, end what is held, then go."""
        self.leaving = True
        self.demand()
        self._go_when_done()

    def _go_when_done(self) -> None:
        if self.leaving and self.alive and not self._held:
            self.alive = False
            self._say(2, 0, [])

    # ------------------------------------------------------------------------------------------------ tasks

    def take(self, record: Task | Cancel) -> None:
        """A record of the inbox."""
        key = (record.kind, record.group, record.replica, record.attempt)
        if isinstance(record, Cancel):
            self._release(key)
            return
        self._next_sequence = record.sequence + 1
        view = HeldTask(kind=record.kind, group=record.group, replica=record.replica, attempt=record.attempt)
        episode = _Episode(record, view, self._world.draw(record.group), started=self._world.clock.now)
        self._account()
        self._held[key] = episode
        left = (record.deadline_ms - self._world.driver.now_ms) / 1000
        self._world.clock.after(left, lambda: self._timed_out(episode))
        self._generate(episode)
        self.demand()

    def load(self, policy: int, version: int) -> None:
        """New weights are in force; the engine stands still while it takes them up."""
        if not self.alive or version <= self.versions[policy]:
            return
        self.versions[policy] = version
        swap = self._world.plan.machines.swap_seconds
        if swap:
            self.engines[policy].pause(swap)
        for episode in list(self._held.values()):
            if episode.running is not None and episode.running[0] == policy:
                episode.newest[policy] = version
            if episode.early:
                episode.early = False
                self._generate(episode)
        self.demand()

    def _generate(self, episode: _Episode) -> None:
        """Sample the next turn, or wait for weights that are new enough."""
        policy = self._turn_policies[episode.turn % len(self._turn_policies)]
        bound = next(b.min_version for b in episode.task.policies if b.policy == policy)
        if self.versions[policy] < bound:
            episode.early = True
            return
        episode.oldest.setdefault(policy, self.versions[policy])
        episode.newest[policy] = self.versions[policy]
        tokens = float(episode.draw.tokens[episode.task.replica, episode.turn])
        if tokens <= 0:
            self._sampled(episode)
            return
        number = self.engines[policy].add(tokens, lambda: self._sampled(episode))
        episode.running = (policy, number)

    def _sampled(self, episode: _Episode) -> None:
        """A turn has been sampled: the environment answers, or never does."""
        episode.running = None
        if episode.ended:
            return
        replica, turn = episode.task.replica, episode.turn
        if episode.draw.hangs_in[replica] == turn:
            return
        self._later(float(episode.draw.environment[replica, turn]), episode, self._answered)

    def _answered(self, episode: _Episode) -> None:
        episode.turn += 1
        if episode.turn < self._world.plan.work.turns:
            self._generate(episode)
        else:
            self._later(float(episode.draw.reward[episode.task.replica]), episode, self._done)

    def _later(self, seconds: float, episode: _Episode, what: Callable[[_Episode], None]) -> None:
        def fire() -> None:
            if not episode.ended:
                what(episode)

        if seconds > 0:
            self._world.clock.after(seconds, fire)
        else:
            fire()

    def _done(self, episode: _Episode) -> None:
        self._report(episode, "stop")

    def _timed_out(self, episode: _Episode) -> None:
        if not episode.ended:
            self._abort(episode)
            self._report(episode, "env_timeout")

    # ------------------------------------------------------------------------------------------------ results

    def _report(self, episode: _Episode, end_reason: str) -> None:
        """Write the result; the task is held until it is acknowledged."""
        episode.ended = True
        self.reported += 1
        self._world.write("trajectories", self._trajectory(episode, end_reason))
        task = episode.task
        key = (task.kind, task.group, task.replica, task.attempt)
        self._world.clock.after(self._world.plan.machines.hop_seconds, lambda: self._release(key))

    def _release(self, key: Key) -> None:
        self._account()
        episode = self._held.pop(key, None)
        if episode is None:
            return
        self._abort(episode)
        self.demand()
        self._go_when_done()

    def _abort(self, episode: _Episode) -> None:
        episode.ended = True
        if episode.running is not None:
            policy, number = episode.running
            episode.running = None
            self.engines[policy].abort(number)

    def _account(self) -> None:
        now = self._world.clock.now
        self.held_seconds += (now - self._seen) * len(self._held)
        self._seen = now

    def _trajectory(self, episode: _Episode, end_reason: str) -> Trajectory:
        task, failed = episode.task, end_reason == "env_timeout"
        sequences = [] if failed else [self._sequence(episode, policy) for policy in sorted(episode.oldest)]
        return Trajectory(
            group=task.group, replica=task.replica, attempt=task.attempt, worker=self.name, incarnation=1,
            stream=task.stream, prompt_id=task.prompt.prompt_id, status="excluded" if failed else "train",
            end_reason=end_reason, reward=float(task.replica % 2) if episode.draw.passes else 1.0, tokens=1,
            started_ms=round(1000 * episode.started), finished_ms=self._world.driver.now_ms,
            error="the environment did not answer" if failed else "", sequences=sequences,
        )  # fmt: skip

    def _sequence(self, episode: _Episode, policy: int) -> Sequence:
        oldest, newest = episode.oldest[policy], episode.newest[policy]
        return Sequence(
            policy=policy, role=f"policy{policy}", prompt_length=1, end_reason="stop", oldest_version=oldest,
            newest_version=newest, tokens=_TOKENS, logprobs=_LOGPROBS, mask=_MASK,
            versions=np.array([-1, oldest], "int32"),
        )  # fmt: skip
