"""What is simulated: the work, the machines, how far rollouts may run ahead. TOML with three sections, all optional.

``[work]`` has lengths, environments, rewards and failures, ``[machines]`` engines and trainers, ``[flow]`` the settings
of policies and streams that a run's configuration has. Unknown keys are refused.
"""

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.pipeline.simulation.laws import Law
from headrace.schemas.config import RunConfig
from headrace.schemas.trainer_config import Section

__all__ = ("Flow", "Machines", "Plan", "Work")


class Work(Section):
    """``[work]``: what one group is. Lengths are in tokens, times in seconds."""

    batch_groups: int = Field(32, ge=1)
    """B: groups of a batch."""
    group_size: int = Field(8, ge=1)
    """G: trajectories of a group."""
    length: Law = Law(law="lognormal", mean=500, sigma=0.8)
    """Tokens that the engine samples in one turn."""
    prompt_sigma: float = Field(0.0, ge=0)
    """Spread of the logarithm of a factor on the lengths that all members of a group share; its mean is 1."""
    turns: int = Field(1, ge=1)
    """Turns of an episode."""
    policies: list[int] = Field(default_factory=lambda: [0])
    """Policy that samples each turn, repeated over the turns."""
    environment: Law = Law()
    """Seconds of the environment after each turn; the engine's row is free meanwhile."""
    reward: Law = Law()
    """Seconds of the reward, beside generation."""
    pass_rate: float = Field(1.0, gt=0, le=1)
    """Share of groups that dynamic sampling keeps; below 1 the operator is in place."""
    fail_stop: float = Field(0.0, ge=0, lt=1)
    """Share of trajectories whose environment hangs: their deadline ends them."""
    fail_slow: float = Field(0.0, ge=0, lt=1)
    """Share of trajectories whose environment is ``slow_factor`` times slower."""
    slow_factor: float = Field(5.0, ge=1)
    """How much slower those are."""
    growth: list[float] = Field(default_factory=list)
    """Factors on the lengths in the course of the run, equally spaced over its steps; empty: 1."""


class Machines(Section):
    """``[machines]``: who does the work."""

    engines: int = Field(4, ge=1)
    """Engines (workers), one to a GPU."""
    slots: int = Field(64, ge=1)
    """Sequences that an engine runs at once."""
    tasks: int = Field(0, ge=0)
    """Tasks that a worker holds at most; 0: ``slots`` and one more."""
    speeds: list[float] = Field(default_factory=lambda: [1.0])
    """Speed of each engine, repeated over the engines."""
    step_seconds: float = Field(0.02, ge=0)
    """Time of one decode step."""
    row_seconds: float = Field(0.0003, ge=0)
    """Further time of a step for each running sequence."""
    trainer_gpus: float = Field(4, gt=0)
    """GPUs of each policy's trainer."""
    train_seconds: float = Field(0.0, ge=0)
    """Time of a step, whatever the batch."""
    train_token_seconds: float = Field(0.0, ge=0)
    """Further GPU time for each trained token, shared by the trainer's GPUs."""
    train_sample_seconds: float = Field(0.0, ge=0)
    """Further GPU time for each trained trajectory, shared by the trainer's GPUs."""
    train_sigma: float = Field(0.0, ge=0)
    """Spread of the logarithm of a step's time; its mean stays."""
    publish_seconds: float = Field(0.0, ge=0)
    """Time from the end of a step to its weights in the store; the trainer waits for it."""
    load_seconds: float = Field(0.0, ge=0)
    """Time until a worker has fetched new weights; it goes on meanwhile."""
    swap_seconds: float = Field(0.0, ge=0)
    """Time for which an engine stands still to take new weights up."""
    hop_seconds: float = Field(0.005, gt=0)
    """A record's way from one stage to the next (protocol 7: 13 ms through three)."""

    @model_validator(mode="after")
    def _engines_take_time(self) -> "Machines":
        if self.step_seconds + self.row_seconds <= 0:
            raise ValueError("step_seconds and row_seconds are both 0: an engine needs time for a token")
        if min(self.speeds, default=0) <= 0:
            raise ValueError("speeds must be above 0, and there must be one at least")
        return self


class Flow(Section):
    """``[flow]``: settings of the run that decide how far rollouts run ahead; they mean what they mean in a run."""

    policies: int = Field(1, ge=1)
    """Trained policies; a trainer each."""
    depth: float = Field(1.0, ge=0)
    """d of ``[policies.P]``."""
    max_staleness: int = Field(-1, ge=-1)
    """A of ``[policies.P]``."""
    ahead: int = Field(1, ge=0)
    """Batches composed ahead of the trainer."""
    mode: Literal["wait", "drop"] = "wait"
    """What happens to a group that would grow too old."""
    extra_groups: int = Field(0, ge=0)
    """Groups beyond what batches need."""
    extra_replicas: int = Field(0, ge=0)
    """Replicas beyond the group's size."""
    exact_refill: bool = False
    """One new group for each filtered one, and none in expectation."""
    task_deadline_seconds: float = Field(0.0, ge=0)
    """0: twice the longest episode that the laws give."""
    min_members: int = Field(2, ge=1)
    """Usable members with which a group may close short."""


class Plan(Section):
    """One simulated run."""

    work: Work = Work()
    machines: Machines = Machines()
    flow: Flow = Flow()
    steps: int = Field(12, ge=1)
    """Steps of every trainer."""
    warm_up: int = Field(2, ge=0)
    """Steps before measuring begins."""
    seed: int = 0

    @model_validator(mode="after")
    def _something_is_measured(self) -> "Plan":
        if self.warm_up >= self.steps:
            raise ValueError(f"warm_up is {self.warm_up} of {self.steps} steps: nothing would be measured")
        if max(self.work.policies, default=0) >= self.flow.policies:
            raise ValueError(
                f"work.policies names policy {max(self.work.policies)}, flow.policies is {self.flow.policies}"
            )
        return self

    def with_(self, **sections: dict[str, Any] | int) -> "Plan":
        """A copy with keys of sections replaced: ``plan.with_(flow={"depth": 2}, seed=1)``. Checked again."""
        data = self.model_dump()
        for name, value in sections.items():
            data[name] = {**data[name], **value} if isinstance(value, dict) else value
        return Plan.model_validate(data)

    def capacity(self) -> int:
        """Tasks that a worker announces."""
        return self.machines.tasks or self.machines.slots + 1

    def deadline_seconds(self) -> float:
        """Deadline of a task in force."""
        if self.flow.task_deadline_seconds:
            return self.flow.task_deadline_seconds
        work, machines = self.work, self.machines
        factor = max(work.growth, default=1.0) * math.exp(3 * work.prompt_sigma)
        token = (machines.step_seconds + machines.row_seconds * machines.slots) / min(machines.speeds)
        turn = work.length.largest() * factor * token + work.environment.largest() * work.slow_factor
        waiting = max(1.0, self.capacity() / machines.slots)
        return 60 + 2 * waiting * work.turns * turn + work.reward.largest()

    def heartbeat_seconds(self) -> float:
        """Longest time between two Demand records: nobody dies in a simulation, so it is seldom."""
        return max(2.0, self.deadline_seconds() / 50)

    def config(self) -> RunConfig:
        """The configuration under which the stages run."""
        flow, work = self.flow, self.work
        policy = {
            "model": "none", "depth": flow.depth, "max_staleness": flow.max_staleness, "ahead": flow.ahead,
            "mode": flow.mode, "extra_groups": flow.extra_groups, "exact_refill": flow.exact_refill,
            "trainer": {"batch_groups": work.batch_groups},
        }  # fmt: skip
        stream = {
            "dataset": "none", "group_size": work.group_size, "extra_replicas": flow.extra_replicas,
            "min_members": min(flow.min_members, work.group_size), "pacing": "all",
        }  # fmt: skip
        deadline = self.deadline_seconds()
        return RunConfig.model_validate(
            {
                "run": {"id": "simulation", "group_partitions": 1, "inboxes": 1, "lanes": 1},
                "rollout": {
                    "engine": "scripted", "slots": self.machines.slots, "task_deadline_seconds": deadline,
                    "heartbeat_seconds": self.heartbeat_seconds(), "lease_seconds": 10 * self.heartbeat_seconds(),
                },
                "policies": {f"p{i}": policy for i in range(flow.policies)},
                "streams": {"main": stream},
                "operators": [{"type": "dynamic_sampling"}] if work.pass_rate < 1 else [],
            }
        )  # fmt: skip
