"""ROLL Flash on generation: Figures 7 and 8 (arXiv 2510.11345, 5.1; docs/simulation.md)."""

from collections.abc import Mapping, Sequence

from headrace.pipeline.simulation.baselines import batch_rounds, one_engine_per_prompt
from headrace.pipeline.simulation.draws import Draws
from headrace.pipeline.simulation.laws import Law
from headrace.pipeline.simulation.plan import Flow, Machines, Plan, Work
from headrace.pipeline.simulation.study import Chart, Result, Row, Study
from headrace.pipeline.simulation.world import simulate

__all__ = ("ROLLOUTS", "queue_plan", "queue_speeds", "replication_plan", "replication_speeds")

_SIZES = {(32, 16): 1.30, (64, 16): 1.84, (16, 32): 1.95, (16, 64): 1.84}
"""(prompts, candidates) -> the paper's speed-up by replication."""


def queue_plan(extra: int, seed: int, *, pass_rate: float = 0.5, sigma: float = 0.3, exact: bool = False) -> Plan:
    """8 x 8 with a filter that keeps half of the groups; slots without end (D4)."""
    return Plan(
        work=Work(
            batch_groups=8, group_size=8, length=Law(law="lognormal", mean=55, sigma=sigma), prompt_sigma=sigma,
            pass_rate=pass_rate,
        ),
        machines=Machines(engines=1, slots=4096, step_seconds=1.0, row_seconds=0.0),
        flow=Flow(depth=0, extra_groups=extra, exact_refill=exact), steps=8, warm_up=2, seed=seed,
    )  # fmt: skip


def queue_speeds(seed: int) -> dict[str, float]:
    """Seconds a batch, length bias and tokens started: in rounds, and by queues with and without spare groups."""
    plan = queue_plan(0, seed)
    out = {"rounds": batch_rounds(plan, Draws(plan), 20)}
    for name, extra, exact in (("16", 16, False), ("16 exact", 16, True), ("0", 0, False)):
        found = simulate(queue_plan(extra, seed, exact=exact))
        out[name] = found.step_seconds
        out[f"length {name}"] = found.length_ratio
        out[f"started {name}"] = found.started_share
    return out


def _tell_queue(found: Mapping[str, float]) -> Result:
    rows = [
        Row("seconds a batch, in rounds", found["rounds"], 125),
        Row("seconds a batch, 16 spare groups", found["16"], 37),
        Row("speed-up, 16 spare groups", found["rounds"] / found["16"], 3.4),
        Row("trained length over all, 16 spare groups", found["length 16"], None, "below 1: the short ones are kept"),
        Row("tokens started for each trained, 16 spare groups", found["started 16"]),
        Row("speed-up, 16 spare groups, one for one", found["rounds"] / found["16 exact"], 3.4, "exact_refill"),
        Row("trained length over all, one for one", found["length 16 exact"]),
        Row("tokens started for each trained, one for one", found["started 16 exact"]),
        Row("speed-up, no spare groups", found["rounds"] / found["0"]),
        Row("trained length over all, no spare groups", found["length 0"]),
    ]
    bars = {row.name.removeprefix("speed-up, "): row.ours for row in rows if row.name.startswith("speed-up")}
    return Result(rows, [Chart("Figure 7: speed-up over rounds of batches", bars=bars)])


def replication_plan(prompts: int, candidates: int, seed: int) -> Plan:
    """32 engines whose speed falls by 1 / (1 + b / 16) with b sequences; spreads 1.0 and 0.5 (D5)."""
    return Plan(
        work=Work(
            batch_groups=prompts, group_size=candidates, length=Law(law="lognormal", mean=12, sigma=0.5),
            prompt_sigma=1.0,
        ),
        machines=Machines(engines=32, slots=64, step_seconds=1.0, row_seconds=1 / 16),
        flow=Flow(depth=0), steps=2, warm_up=0, seed=seed,
    )  # fmt: skip


def replication_speeds(seed: int) -> dict[str, float]:
    """Seconds a batch with candidates together and on their own, 16 x 64 and 64 x 16."""
    return _replication(seed, [(16, 64), (64, 16)])


def _all_sizes(seed: int) -> dict[str, float]:
    return _replication(seed, list(_SIZES))


def _replication(seed: int, sizes: Sequence[tuple[int, int]]) -> dict[str, float]:
    out = {}
    for prompts, candidates in sizes:
        plan = replication_plan(prompts, candidates, seed)
        draws = Draws(plan)
        batches = [[draws.group(b * prompts + i) for i in range(prompts)] for b in range(plan.warm_up, plan.steps)]
        whole = sum(one_engine_per_prompt(plan, groups) for groups in batches)
        out[f"together {prompts}x{candidates}"] = whole / len(batches)
        out[f"ours {prompts}x{candidates}"] = simulate(plan).step_seconds
    return out


def _tell_replication(found: Mapping[str, float]) -> Result:
    rows = [
        Row(f"speed-up, {p} x {c}", found[f"together {p}x{c}"] / found[f"ours {p}x{c}"], paper)
        for (p, c), paper in _SIZES.items()
    ]
    bars = {row.name.removeprefix("speed-up, "): row.ours for row in rows}
    return Result(rows, [Chart("Figure 8: speed-up of candidates as tasks of their own", bars=bars)])


ROLLOUTS = (
    Study(
        "fig7", "Figure 7: queue scheduling with a filter and 16 spare prompts",
        "A filtered group gives its credit back at once and another is admitted, by the share that the filter keeps; a "
        "batch is composed from the first that pass. Both the speed and the bias to short answers come from taking the "
        "first: without spare groups neither is there.",
        queue_speeds, _tell_queue,
    ),
    Study(
        "fig8", "Figure 8: candidates of one prompt on different engines",
        "Each replica goes to the worker with the most free slots. The gain is the balance of engines, so it is "
        "largest where there are fewer prompts than engines; at 64 x 16 the baseline is balanced already, and the "
        "paper's 1.84 cannot come from this cause alone.",
        _all_sizes, _tell_replication,
    ),
)  # fmt: skip
"""Studies of this module."""
