"""Plans for runs on a simulated cluster, drawn from a seed: which parts are real, and what happens to them."""

from __future__ import annotations

import random

from flow_world import PolicyPlan
from sim_world import ClusterPlan

CLUSTER_FAULTS = (
    "kill", "freeze", "twin", "stage", "stuck", "outage", "trainer", "operator_freeze", "operator_twin",
)  # fmt: skip
TRAINER_FAULTS = ("trainer", "zombie", "overlap", "rollback", "store", "outage", "kill")


def cluster_plan(seed: int) -> ClusterPlan:
    """Real operator workers, alone or in pairs, under every fault of processes and of the broker."""
    r = random.Random(f"cluster {seed}")
    policies = [
        PolicyPlan(
            batch=r.randint(1, 4),
            depth=r.choice([0, 0.5, 1, 2]),
            replay=r.choice([0, 0, 0.5]),
            mode=r.choice(["wait", "drop"]),
        )
        for _ in range(r.choice([1, 1, 2]))
    ]
    return ClusterPlan(
        seed=seed,
        prompts=r.randint(4, 16),
        members=r.choice([1, 1, 2]),
        parts=r.randint(1, 3),
        workers=r.randint(1, 3),
        policies=policies,
        group_size=r.randint(1, 3),
        task_ms=r.choice([500, 2000]),
        faults=tuple(f for f in CLUSTER_FAULTS if r.random() < 0.5),
        mtbf_ms=r.choice([2000, 6000]),
        fault_end_ms=r.choice([20_000, 40_000]),
        limit_ms=600_000,
    )


def trainer_plan(seed: int, folder: str) -> ClusterPlan:
    """Real operators and real trainers with a toy step, under every fault of trainers and of the object store."""
    r = random.Random(f"trainer {seed}")
    policies = [
        PolicyPlan(
            batch=r.randint(1, 3),
            depth=r.choice([0, 0.5, 1, 2]),
            checkpoint_every=r.randint(1, 6),
            max_steps=r.choice([0, 0, 4]),
        )
        for _ in range(r.choice([1, 1, 2]))
    ]
    return ClusterPlan(
        seed=seed,
        folder=folder,
        prompts=r.randint(8, 24),
        workers=2,
        policies=policies,
        group_size=1,
        faults=tuple(f for f in TRAINER_FAULTS if r.random() < 0.6),
        mtbf_ms=r.choice([1500, 4000]),
        fault_end_ms=r.choice([15_000, 40_000]),
        limit_ms=600_000,
        discard=r.random() < 0.5,
    )


def whole_plan(seed: int, folder: str) -> ClusterPlan:
    """Everything real: operators, rollout workers with the scripted engine, trainers with a toy step."""
    r = random.Random(f"whole {seed}")
    plan = trainer_plan(seed, folder)
    plan.real_workers, plan.group_size = True, r.randint(1, 2)
    plan.slots, plan.workers = r.randint(1, 3), r.randint(1, 3)
    more = ("freeze", "twin", "stage", "operator_freeze", "operator_twin")
    plan.faults += tuple(f for f in more if r.random() < 0.3)
    return plan


def racing_plan(seed: int, folder: str) -> ClusterPlan:
    """Trainers that die, are frozen and overlap all the time, and nothing else."""
    plan = trainer_plan(seed, folder)
    plan.faults, plan.mtbf_ms, plan.fault_end_ms = ("trainer", "zombie", "overlap"), 800, 30_000
    for policy in plan.policies:
        policy.max_steps = 0
    return plan


def returning_plan(seed: int, folder: str) -> ClusterPlan:
    """Trainers that go back to earlier versions and die around it."""
    plan = trainer_plan(seed, folder)
    plan.faults, plan.mtbf_ms, plan.fault_end_ms = ("rollback", "trainer"), 2500, 30_000
    for policy in plan.policies:
        policy.max_steps, policy.checkpoint_every = 0, 2
    return plan


def late_plan(seed: int, folder: str) -> ClusterPlan:
    """A short undisturbed run of real parts, to whose end another worker comes."""
    return ClusterPlan(
        seed=seed, folder=folder, prompts=4, workers=1, group_size=1, real_workers=True, late_worker=True,
        limit_ms=200_000,
    )  # fmt: skip
