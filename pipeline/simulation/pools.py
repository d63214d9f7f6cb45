"""AstraFlow: two policies at once, a pool of three speeds, and a pool that is resized (arXiv 2605.15565, 4.1, 4.2)."""

from collections.abc import Mapping

import numpy as np

from headrace.pipeline.balance import Zones
from headrace.pipeline.balance_apply import Bounds
from headrace.pipeline.simulation.draws import Draws
from headrace.pipeline.simulation.laws import Law
from headrace.pipeline.simulation.plan import Flow, Machines, Plan, Work
from headrace.pipeline.simulation.scaling import ScaledPool
from headrace.pipeline.simulation.study import Chart, Result, Row, Study
from headrace.pipeline.simulation.world import World, simulate

__all__ = ("POOLS", "autoscale", "pool_plan", "three_speeds", "two_policies")

_STEP_SECONDS = 77.65
"""AstraFlow's iteration, which its trainers of 2 GPUs decide: the paper's latency of a training step."""


DEPTH = 2
"""Batches ahead; AstraFlow has no bound on them, and one on staleness of 8."""

# --------------------------------------------------------------------------------------------------- two policies


def two_policy_plan(seed: int, *, together: bool) -> Plan:
    """Solver and verifier, 32 prompts x 8, at most 4,096 tokens a turn, 8 GPUs (appendix A.2).

    ``together``: all GPUs sample, then train one policy after the other. Else 4 GPUs sample and 2 train each policy.
    """
    gpus = 8 if together else 2
    return Plan(
        work=Work(
            batch_groups=32, group_size=8, turns=2, policies=[0, 1],
            length=Law(law="lognormal", mean=1100, sigma=0.9, cap=4096),
        ),
        machines=Machines(
            engines=gpus, slots=128, step_seconds=0.0205, row_seconds=0.00003, trainer_gpus=4 if together else 2,
            train_sample_seconds=_STEP_SECONDS * 2 / 256, swap_seconds=0.1, load_seconds=1.0,
        ),
        flow=Flow(policies=2, depth=0 if together else DEPTH, max_staleness=-1 if together else 8),
        steps=2 if together else 6, warm_up=0 if together else 2, seed=seed,
    )  # fmt: skip


def _roles_in_turn(plan: Plan, batches: int) -> float:
    """Synchronous rounds: all solvers, then all verifiers, then both trainers with all GPUs."""
    draws, machines, work = Draws(plan), plan.machines, plan.work
    total = 0.0
    for batch in range(batches):
        groups = [draws.group(batch * work.batch_groups + i) for i in range(work.batch_groups)]
        tokens = np.concatenate([g.tokens for g in groups])
        rows = len(tokens) / machines.engines
        total += float(tokens.max(axis=0).sum()) * (machines.step_seconds + machines.row_seconds * rows)
    train = 2 * machines.train_sample_seconds * work.batch_groups * work.group_size / machines.engines
    return total / batches + train


def two_policies(seed: int) -> dict[str, float]:
    """Seconds of a step: roles and trainers in turn, and rollouts ahead."""
    together = two_policy_plan(seed, together=True)
    ahead = World(two_policy_plan(seed, together=False)).play().outcome()
    return {
        "in turn": _roles_in_turn(together, 4),
        "ahead": ahead.step_seconds, "waits": ahead.wait_share, "staleness": ahead.mean_staleness,
    }  # fmt: skip


def _with_tasks(seed: int) -> dict[str, float]:
    return two_policies(seed) | {"tasks": simulate(two_policy_plan(seed, together=True)).step_seconds}


def _tell_two_policies(found: Mapping[str, float]) -> Result:
    rows = [
        Row("seconds a step, roles and trainers in turn", found["in turn"], 212.64),
        Row("seconds a step, rollouts ahead", found["ahead"], _STEP_SECONDS),
        Row("speed-up, rollouts ahead", found["in turn"] / found["ahead"], 212.64 / _STEP_SECONDS),
        Row("speed-up, synchronous tasks", found["in turn"] / found["tasks"], None, "no barrier between roles"),
        Row("share of its time that a trainer waits", found["waits"]),
        Row("mean staleness", found["staleness"]),
    ]
    bars = {"in turn": found["in turn"], "synchronous tasks": found["tasks"], "ahead": found["ahead"]}
    return Result(rows, [Chart("Two policies: seconds a step", bars=bars)])


# --------------------------------------------------------------------------------------------------- three speeds


def _speeds_plan(speeds: list[float], seed: int) -> Plan:
    return Plan(
        work=Work(batch_groups=24, group_size=2, length=Law(law="lognormal", mean=2000, sigma=0.6, cap=8000)),
        machines=Machines(engines=len(speeds), slots=8, speeds=speeds, step_seconds=0.02, row_seconds=0.001,
                          train_seconds=1.0),
        flow=Flow(depth=2, max_staleness=8), steps=12, warm_up=3, seed=seed,
    )  # fmt: skip


def three_speeds(seed: int) -> dict[str, float]:
    """Rates of a pool at 100, 60 and 30 % and of each alone; samples a second."""
    speeds = [1.0, 0.6, 0.3]
    pool = simulate(_speeds_plan(speeds, seed))
    alone = [simulate(_speeds_plan([speed], seed)).samples_per_second for speed in speeds]
    return {"pool": pool.samples_per_second, "sum": sum(alone), "staleness": pool.mean_staleness}


def _tell_three_speeds(found: Mapping[str, float]) -> Result:
    return Result(
        [Row("rate of the pool over the sum of single rates", found["pool"] / found["sum"], 1.0),
         Row("mean staleness", found["staleness"])]
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- table 4


def pool_plan(engines: int, seed: int, steps: int = 100) -> Plan:
    """A trainer of 4 GPUs whose step takes 70 s; rollouts whose lengths change in the course of the run.

    ``growth`` is fitted on the wait shares of the two fixed pools (26.9 % and 2.1 %); everything else is measured.
    """
    return Plan(
        work=Work(
            batch_groups=16, group_size=1, length=Law(law="lognormal", mean=2000, sigma=0.5, cap=18_000),
            growth=[0.4, 1.5],
        ),
        machines=Machines(
            engines=engines, slots=2, step_seconds=0.03, row_seconds=0.0028, train_seconds=70.0, trainer_gpus=4,
            load_seconds=2.0,
        ),
        flow=Flow(depth=2, max_staleness=8, min_members=1), steps=steps, warm_up=0, seed=seed,
    )  # fmt: skip


def autoscale(seed: int, steps: int = 100) -> dict[str, float]:
    """Wall seconds and GPU seconds of fixed pools of 6 and 11, and of one that the balance report resizes."""
    out: dict[str, float] = {}
    for size in (6, 11):
        fixed = simulate(pool_plan(size, seed, steps))
        out |= _costs(f"fixed {size}", fixed.seconds, fixed.engine_seconds, fixed.wait_share)
    bounds, zones = (
        Bounds(least=2, most=14, cool_down_seconds=60),
        Zones(grow_above=0.04, shrink_below=0.02, busy_above=0.96),
    )
    pool = ScaledPool(pool_plan(11, seed, steps), bounds, versions=3, zones=zones)
    scaled = pool.play().outcome()
    out |= _costs("scaled", scaled.seconds, scaled.engine_seconds, scaled.wait_share)
    sizes = [size for _, size, _ in pool.sizes]
    for tenth in range(10):
        out[f"size {tenth}"] = float(np.mean(sizes[tenth * len(sizes) // 10 : (tenth + 1) * len(sizes) // 10 or 1]))
    return out


def _costs(name: str, wall: float, engine_seconds: float, waits: float) -> dict[str, float]:
    total = engine_seconds + 4 * wall
    return {f"{name} wall": wall, f"{name} rollout": engine_seconds, f"{name} total": total, f"{name} waits": waits}


def _tell_autoscale(found: Mapping[str, float]) -> Result:
    hours = 1200 / 100 / 3600
    saved = 1 - found["scaled total"] / found["fixed 11 total"]
    rows = []
    paper = {"fixed 6": (35.8, 358.0, 0.269), "fixed 11": (23.9, 359.2, 0.021), "scaled": (24.4, 312.0, 0.030)}
    for name, (wall, total, waits) in paper.items():
        rows.append(Row(f"wall hours of 1,200 steps, {name}", found[f"{name} wall"] * hours, wall))
        rows.append(Row(f"GPU hours, {name}", found[f"{name} total"] * hours, total))
        rows.append(Row(f"wait share, {name}", found[f"{name} waits"], waits))
    rows.append(Row("GPU hours saved by resizing, against fixed 11", saved, 1 - 312.0 / 359.2))
    rows.append(Row("wall time, resized over fixed 11", found["scaled wall"] / found["fixed 11 wall"], 24.4 / 23.9))
    sizes = {"workers": [(float(t), found[f"size {t}"]) for t in range(10)]}
    return Result(rows, [Chart("Table 4: size of the resized pool over tenths of the run", lines=sizes)])


POOLS = (
    Study(
        "two_policies", "Two policies on one prompt",
        "Both policies train at the same time on their own GPUs while the next episodes are sampled; a verifier starts "
        "when its solver has ended. The trainer decides the pace, so it cannot be quicker than the paper's step.",
        _with_tasks, _tell_two_policies,
    ),
    Study(
        "three_speeds", "A pool at 100, 60 and 30 %",
        "Tasks go to whoever has room, one ahead of what it can run; a slow worker asks less often.",
        three_speeds, _tell_three_speeds,
    ),
    Study(
        "table4", "Table 4: a resized pool against fixed ones",
        "The balance report sees idle slots, not overproduction: admission never lets a pool produce what nobody "
        "trains. So it can shrink to what is needed as soon as slots are idle, and below the paper's least size.",
        autoscale, _tell_autoscale,
    ),
)  # fmt: skip
"""Studies of this module."""
