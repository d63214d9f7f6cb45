"""What running ahead buys: depth or a buffer, Table 1 and Propositions 1 and 2 of ROLL Flash (arXiv 2510.11345)."""

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.pipeline.simulation.baselines import in_order, one_after_the_other
from headrace.pipeline.simulation.bounds import balanced, rollout_bound, step_bound
from headrace.pipeline.simulation.draws import Draws
from headrace.pipeline.simulation.laws import Law
from headrace.pipeline.simulation.plan import Flow, Machines, Plan, Work
from headrace.pipeline.simulation.study import Chart, Result, Row, Study
from headrace.pipeline.simulation.world import World, simulate

__all__ = ("ASYNCHRONY", "bound_violations", "depth_plan", "depth_speeds")

_UNIT = 10.0
"""Seconds of one unit of D6's law, so that the topics' milliseconds are as small beside it as they are in work."""
_D6 = {"1": 1.92, "2": 2.74, "4": 3.70}
"""alpha -> ROLL's rule at 256 samples on 64 slots, simulated apart."""


def depth_plan(depth: float, bound: int, seed: int, *, samples: int = 256, slots: int = 64, mode: str = "wait") -> Plan:
    """Lognormal lengths of spread 1 up to 20 units; a step takes as long as its rollouts would on busy slots (D6)."""
    law = Law(law="lognormal", mean=_UNIT * float(np.exp(0.5)), sigma=1.0, cap=20 * _UNIT)
    mean = float(law.draw(np.random.default_rng(0), 200_000).mean())
    return Plan.model_validate(
        {
            "work": Work(batch_groups=samples, group_size=1, length=law),
            "machines": Machines(
                engines=1, slots=slots, step_seconds=1.0, row_seconds=0.0, train_seconds=samples * mean / slots
            ),
            "flow": Flow(depth=depth, max_staleness=bound, mode=mode, min_members=1),
            "steps": 10, "warm_up": 3, "seed": seed,
        }
    )  # fmt: skip


def depth_speeds(seed: int) -> dict[str, float]:
    """Speed-up over depth 0 and staleness at d = 1, A = 4."""
    return _depths(seed, [(1, 4, "wait")])


def _all_depths(seed: int) -> dict[str, float]:
    out = _depths(seed, [(1, 4, "wait"), (2, 4, "wait"), (1, 1, "wait"), (1, 1, "drop")])
    base = out["base"]
    for alpha in _D6:
        out[f"in order {alpha}"] = base / in_order(depth_plan(1, 4, seed).with_(steps=40), int(alpha))
    return out


def _depths(seed: int, wanted: Sequence[tuple[float, int, str]]) -> dict[str, float]:
    base = one_after_the_other(depth_plan(0, -1, seed), 60)
    out = {"base": base}
    for depth, bound, mode in wanted:
        found = simulate(depth_plan(depth, bound, seed, mode=mode))
        name = f"{depth},{bound},{mode}"
        out[name] = base / found.step_seconds
        out[f"mean {name}"], out[f"max {name}"] = found.mean_staleness, found.max_staleness
        out[f"length {name}"] = found.length_ratio
    return out


def _tell_depth(found: Mapping[str, float]) -> Result:
    rows = [
        Row("speed-up, d = 1, A = 4", found["1,4,wait"], 1.92, "ROLL's rule at alpha 1, simulated apart"),
        Row("mean staleness, d = 1, A = 4", found["mean 1,4,wait"], 1.0),
        Row("largest staleness, d = 1, A = 4", found["max 1,4,wait"]),
        Row("speed-up, d = 2, A = 4", found["2,4,wait"], 2.74, "ROLL's rule at alpha 2"),
        Row("mean staleness, d = 2, A = 4", found["mean 2,4,wait"], 2.0),
        Row("speed-up, d = 1, A = 1", found["1,1,wait"], 1.92, "waits for every straggler, as ROLL does"),
        Row("speed-up, d = 1, A = 1, dropping", found["1,1,drop"], None, "what dropping buys ..."),
        Row("trained length over all, dropping", found["length 1,1,drop"], None, "... and what it costs"),
        *(Row(f"speed-up in start order, alpha {a}", found[f"in order {a}"], paper) for a, paper in _D6.items()),
    ]
    lines = {
        "finished first": [(0.0, 1.0), (1.0, found["1,4,wait"]), (2.0, found["2,4,wait"])],
        "in start order": [(0.0, 1.0), *((float(a), found[f"in order {a}"]) for a in _D6)],
    }
    return Result(rows, [Chart("Speed-up over batches ahead", lines=lines)])


# ---------------------------------------------------------------------------------------------------- table 1


def _best_depth(seed: int) -> dict[str, float]:
    out = {}
    for batch in (32, 64):
        for sigma in (0.5, 1.0):
            law = Law(law="lognormal", mean=20, sigma=sigma, cap=300)
            rates = {}
            for depth in (0, 1, 2, 4):
                plan = depth_plan(depth, depth + 4 if depth else -1, seed, samples=batch, slots=32)
                mean = float(law.draw(np.random.default_rng(0), 100_000).mean())
                train = {"train_seconds": batch * mean / 32}
                work = {"length": law.model_dump()}
                rates[depth] = 1 / simulate(plan.with_(work=work, machines=train, steps=8)).step_seconds
            best = max(rates.values())
            name = f"{batch},{sigma}"
            out[f"least {name}"] = float(min(d for d, rate in rates.items() if rate >= 0.97 * best))
            out[f"two {name}"] = rates[2] / best
    return out


def _tell_best_depth(found: Mapping[str, float]) -> Result:
    rows = []
    for batch in (32, 64):
        for sigma in (0.5, 1.0):
            name = f"{batch},{sigma}"
            rows.append(
                Row(f"least depth for 97 % of the best, batch {batch}, spread {sigma}", found[f"least {name}"], 2)
            )
            rows.append(
                Row(f"throughput at depth 2 over the best, batch {batch}, spread {sigma}", found[f"two {name}"], 1)
            )
    return Result(rows)


# ------------------------------------------------------------------------------------------------- propositions


def bound_violations(seed: int, cases: int = 50) -> dict[str, float]:
    """Random cases of both propositions played by the product; counts those above their bound.

    A record's way is no part of the propositions: every round of tasks is given 0.2 s, against samples of tens of
    seconds.
    """
    rng = np.random.default_rng([seed, 11])
    broken, worst = 0, 0.0
    for case in range(cases):
        share = _rollout_case(rng) if case % 2 else _step_case(rng)
        worst = max(worst, share)
        broken += share > 1.0
    return {"violations": float(broken), "worst": worst, "cases": float(cases)}


def _random_plan(rng: np.random.Generator, batch: int, slots: int, **flow: float) -> Plan:
    law = Law(law="lognormal", mean=float(rng.uniform(20, 80)), sigma=float(rng.uniform(0.1, 1.5)), cap=400)
    return Plan.model_validate(
        {
            "work": Work(batch_groups=batch, group_size=1, length=law),
            "machines": Machines(engines=1, slots=slots, step_seconds=1.0, row_seconds=0.0),
            "flow": Flow(min_members=1, **flow), "seed": int(rng.integers(1 << 30)),
        }
    )  # fmt: skip


def _rollout_case(rng: np.random.Generator) -> float:
    """Proposition 1: time of a batch over its bound."""
    batch, slots = int(rng.integers(2, 20)), int(rng.integers(1, 8))
    plan = _random_plan(rng, batch, slots, depth=0).with_(steps=1, warm_up=0)
    seconds = simulate(plan).first_batch_seconds
    draws = Draws(plan)
    lengths = np.array([draws.group(g).tokens[0, 0] for g in range(batch)])
    allowed = rollout_bound(batch, slots, float(lengths.mean()), float(lengths.max()))
    return seconds / (allowed + 0.2 * (1 + batch / slots))


def _step_case(rng: np.random.Generator) -> float:
    """Proposition 2 with rollouts ahead by ``alpha``: time of all steps over that many bounds and the first filling."""
    batch, slots, alpha = int(rng.integers(2, 10)), int(rng.integers(1, 6)), int(rng.integers(1, 4))
    share = float(rng.uniform(0.2, 0.8))
    machines = slots / (1 - share)
    work = float(rng.uniform(2, 40))
    steps = 5
    plan = _random_plan(rng, batch, slots, depth=alpha, max_staleness=alpha + 8).with_(
        machines={"train_seconds": batch * work / (share * machines)}, steps=steps, warm_up=0
    )
    world = World(plan).play()
    lengths = np.array([world.draw(g).tokens[0, 0] for g, _ in sorted(world.issued)][: batch * steps])
    longest = float(lengths.max())
    bound = step_bound(batch, machines, float(lengths.mean()), longest, work, alpha=alpha, share=share)
    filling = longest + batch * work / (share * machines)
    rounds = steps * (1 + batch / slots)
    return world.trainers[0].steps[-1].ended / (steps * bound + filling + 0.2 * rounds)


def _tell_bounds(found: Mapping[str, float]) -> Result:
    values = {(256, 40, 30, 300, 10, 2): 337.009434, (64, 16, 100, 800, 50, 1): 912.310563}
    rows = [
        Row("cases above their bound, of 50 a seed", found["violations"], None, "the propositions say 0"),
        Row("largest share of a bound that was used", found["worst"]),
    ]
    for (n, k, mean, longest, work, alpha), paper in values.items():
        ours = balanced(n, k, mean, longest, work, alpha).seconds
        rows.append(Row(f"balanced bound of N {n}, K {k}, mean {mean}, L {longest}", ours, paper))
    return Result(rows)


ASYNCHRONY = (
    Study(
        "depth", "What running ahead buys: depth and staleness bound as two knobs",
        "Admission holds (1 + d) batches exactly, whatever finishes first is trained first, and a straggler is waited "
        "for only when it would pass A. So the mean staleness is d, as with ROLL's single knob, but no step stands "
        "still for the slowest of its oldest version.",
        _all_depths, _tell_depth,
    ),
    Study(
        "table1", "Table 1: how many batches ahead are enough",
        "Consumption of what finished first needs a depth of 1 or 2 where consumption in start order needs 4 to 8.",
        _best_depth, _tell_best_depth,
    ),
    Study(
        "bounds", "Propositions 1 and 2",
        "Late binding is list scheduling, which the bounds are about: a free slot never stands beside a waiting task.",
        bound_violations, _tell_bounds,
    ),
)  # fmt: skip
"""Studies of this module."""
