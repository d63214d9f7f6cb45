"""ROLL Flash on environments: Figures 9, 10 and 11 (arXiv 2510.11345, 5.2; docs/simulation.md)."""

from collections.abc import Mapping, Sequence

from headrace.pipeline.simulation.baselines import lockstep
from headrace.pipeline.simulation.draws import Draws
from headrace.pipeline.simulation.laws import Law
from headrace.pipeline.simulation.plan import Flow, Machines, Plan, Work
from headrace.pipeline.simulation.study import Chart, Result, Row, Study
from headrace.pipeline.simulation.world import simulate

__all__ = ("AGENTIC", "environment_speeds", "environments_plan", "redundancy_plan", "redundancy_speeds")

TURNS = 22
"""Turns of an episode, which the text does not give: fitted on 892 and 362 s; the other points are predictions."""
_LATENCIES = {(10, 1): 1.16, (10, 7): 2.12, (10, 10): 2.46, (50, 5): 1.20}
"""(mean, sigma) of an environment's step in seconds -> the paper's speed-up at batch 512."""
_SPARES = {(0, 0): 243.0, (4, 1): 78.4, (4, 3): 46.4, (4, 4): 44.6}
"""(spare groups, spare replicas) beyond 32 x 8 -> the paper's seconds a step; the last is preset ``roll_flash``."""
_FLAKY = (2, 1)
"""The same of ``replicate``'s preset ``flaky``."""


def environments_plan(mean: float, sigma: float, seed: int, depth: float = 0.0) -> Plan:
    """Batch 512, the engine takes no time (D2)."""
    return Plan(
        work=Work(
            batch_groups=64, group_size=8, turns=TURNS, length=Law(),
            environment=Law(law="normal", mean=mean, sigma=sigma),
        ),
        machines=Machines(engines=16, slots=32, tasks=33),
        flow=Flow(depth=depth), steps=2, warm_up=0, seed=seed,
    )  # fmt: skip


def environment_speeds(seed: int) -> dict[str, float]:
    """Seconds a step at N(10,10): in lockstep, with a barrier between batches, and without one."""
    free = environments_plan(10, 10, seed, depth=1).with_(machines={"tasks": 65}, steps=4, warm_up=2)
    return _latency(10, 10, seed) | {"free 10,10": simulate(free).step_seconds}


def _latency(mean: float, sigma: float, seed: int) -> dict[str, float]:
    plan = environments_plan(mean, sigma, seed)
    draws, size = Draws(plan), plan.work.batch_groups
    batches = range(plan.warm_up, plan.steps)
    barrier = [lockstep([draws.group(b * size + i) for i in range(size)]) for b in batches]
    return {
        f"lockstep {mean},{sigma}": sum(barrier) / len(barrier),
        f"ours {mean},{sigma}": simulate(plan).step_seconds,
    }


def _latencies(seed: int) -> dict[str, float]:
    out = environment_speeds(seed)
    for mean, sigma in list(_LATENCIES)[::-1]:
        if (mean, sigma) != (10, 10):
            out |= _latency(mean, sigma, seed)
    return out


def _tell_environments(found: Mapping[str, float]) -> Result:
    rows = []
    for (mean, sigma), paper in _LATENCIES.items():
        ours = found[f"lockstep {mean},{sigma}"] / found[f"ours {mean},{sigma}"]
        rows.append(Row(f"speed-up, latency N({mean},{sigma})", ours, paper))
    rows.append(Row("seconds a step in lockstep, N(10,10)", found["lockstep 10,10"], 892))
    rows.append(Row("seconds a step, N(10,10)", found["ours 10,10"], 362))
    without = found["lockstep 10,10"] / found["free 10,10"]
    rows.append(Row("speed-up at depth 1, N(10,10)", without, None, "no barrier between batches either"))
    bars = {row.name.removeprefix("speed-up, "): row.ours for row in rows[: len(_LATENCIES)]}
    return Result(rows, [Chart("Figure 9: speed-up over lockstep", bars=bars)])


def redundancy_plan(spare_groups: int, spare_replicas: int, seed: int) -> Plan:
    """32 x 8 of N(10,5) with 4 turns; 5 % of the environments stop, which their deadline of 243 s ends (D3)."""
    return Plan(
        work=Work(
            batch_groups=32, group_size=8, turns=4, length=Law(), environment=Law(law="normal", mean=10, sigma=5),
            fail_stop=0.05,
        ),
        machines=Machines(engines=16, slots=32, tasks=33),
        flow=Flow(
            depth=0, extra_groups=spare_groups, extra_replicas=spare_replicas, task_deadline_seconds=243, min_members=2
        ),
        steps=3, warm_up=1, seed=seed,
    )  # fmt: skip


def redundancy_speeds(seed: int) -> dict[str, float]:
    """Seconds a step and tasks started for each trained one: 32 x 8 and 36 x 12."""
    return _spares(seed, [(0, 0), (4, 4)])


def _all_spares(seed: int) -> dict[str, float]:
    return _spares(seed, [*_SPARES, (16, 0), (0, 4), _FLAKY])


def _spares(seed: int, wanted: Sequence[tuple[int, int]]) -> dict[str, float]:
    out = {}
    for groups, replicas in wanted:
        found = simulate(redundancy_plan(groups, replicas, seed))
        out[f"{groups},{replicas}"] = found.step_seconds
        out[f"started {groups},{replicas}"] = found.tasks_share
    return out


def _tell_redundancy(found: Mapping[str, float]) -> Result:
    rows = []
    for (groups, replicas), paper in _SPARES.items():
        rows.append(Row(f"seconds a step, {32 + groups} x {8 + replicas}", found[f"{groups},{replicas}"], paper))
    base = found["0,0"]
    for (groups, replicas), paper in list(_SPARES.items())[1:]:
        name = f"speed-up, {32 + groups} x {8 + replicas}"
        rows.append(Row(name, base / found[f"{groups},{replicas}"], 243.0 / paper))
    rows.append(Row("speed-up, 48 x 8", base / found["16,0"], None, "as many environments as 32 x 12"))
    rows.append(Row("speed-up, 32 x 12", base / found["0,4"], None, "failures are independent: larger groups win"))
    rows.append(Row("speed-up, 34 x 9", base / found["2,1"], None, "preset flaky of the operator replicate"))
    for groups, replicas in ((0, 0), _FLAKY, (4, 4)):
        name = f"episodes started for each trained, {32 + groups} x {8 + replicas}"
        rows.append(Row(name, found[f"started {groups},{replicas}"]))
    bars = {row.name.removeprefix("speed-up, "): row.ours for row in rows if row.name.startswith("speed-up")}
    return Result(rows, [Chart("Figure 10: speed-up over 32 x 8", bars=bars)])


AGENTIC = (
    Study(
        "fig9", "Figure 9: environments that do not wait for each other",
        "Every replica is a task of its own and every episode runs by itself, so nobody waits for the slowest of a "
        "turn; at depth 1 nobody waits for the slowest of a batch either.",
        _latencies, _tell_environments,
    ),
    Study(
        "fig10", "Figure 10: spare groups and spare replicas against environments that stop",
        "A group closes with its first 8 usable members and a batch with its first 32 groups; the rest is cancelled, "
        "in the engine too. The Gaussian latencies of the text alone cannot give the paper's figures: 45 s is below "
        "what they allow, so 5 % of the environments stop.",
        _all_spares, _tell_redundancy,
    ),
)  # fmt: skip
"""Studies of this module."""
