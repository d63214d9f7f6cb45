"""ROLL Flash on clusters: Figures 1b, 3a, 3b, and everything together on its two kinds of work (arXiv 2510.11345).

The text gives models, batch sizes and GPUs, no latencies. Lengths and decode speeds are chosen once, for an 8B model on
an accelerator of 80 GB, and not fitted to any of the results. GPUs are an eighth of the paper's; prompts are an eighth
for everything together, and a sixteenth in the figures that need many runs.
"""

from collections.abc import Mapping

import numpy as np

from headrace.pipeline.simulation.baselines import rows_seconds
from headrace.pipeline.simulation.draws import Draws
from headrace.pipeline.simulation.laws import Law
from headrace.pipeline.simulation.plan import Flow, Machines, Plan, Work
from headrace.pipeline.simulation.study import Chart, Result, Row, Study
from headrace.pipeline.simulation.world import simulate

__all__ = ("CLUSTERS", "agentic_plan", "combined", "reasoning_plan", "round_seconds")

THINKING = Law(law="lognormal", mean=11_000, sigma=0.7, cap=30_720)
"""Completions of a model that thinks."""
BASE = Law(law="lognormal", mean=2_000, sigma=1.0, cap=30_720)
"""Completions of a base model."""
_TOKEN_GPU_SECONDS = 1.6e-4
"""GPU seconds to train one token, forward passes for log-probs included: 8B weights, 2 x 10^14 operations a second."""
_GPUS = (2, 4, 8, 16)
_TRAINING = (2, 3, 4, 6, 8)
_PROMPTS = (8, 16, 32)
_STATED = {"rlvr": 2.24, "agentic": 2.72}


def reasoning_plan(
    gpus: int, seed: int, *, training: float, law: Law = THINKING, prompts: int = 32, depth: float = 1
) -> Plan:
    """``prompts`` x 16 with ``training`` of the GPUs for training; at depth 0 all GPUs do both in turn."""
    together = depth == 0
    trainer = float(gpus) if together else training
    return Plan(
        work=Work(batch_groups=prompts, group_size=16, length=law, prompt_sigma=0.5),
        machines=Machines(
            engines=gpus if together else gpus - int(training), slots=128, step_seconds=0.012, row_seconds=0.00012,
            trainer_gpus=trainer, train_token_seconds=_TOKEN_GPU_SECONDS, publish_seconds=2, swap_seconds=0.1,
            load_seconds=2,
        ),
        flow=Flow(depth=depth, max_staleness=4 if depth else -1), steps=2 if together else 6,
        warm_up=0 if together else 3, seed=seed,
    )  # fmt: skip


def round_seconds(plan: Plan, batches: int) -> float:
    """Mean step of a synchronous trainer that gives each engine its prompts at once and waits for the last token."""
    draws, machines = Draws(plan), plan.machines
    total, number = 0.0, 0
    for _ in range(batches):
        loads: list[list[float]] = [[] for _ in range(machines.engines)]
        tokens = 0.0
        for i in range(plan.work.batch_groups):
            lengths = draws.group(number + i).lengths()
            loads[i % machines.engines] += list(lengths)
            tokens += float(lengths.sum())
        number += plan.work.batch_groups
        rolled = max(rows_seconds(np.array(x), machines.step_seconds, machines.row_seconds) for x in loads if x)
        total += rolled + tokens * machines.train_token_seconds / machines.trainer_gpus + machines.publish_seconds
    return total / batches


def _best(gpus: int, seed: int, shares: tuple[float, ...], **settings: object) -> float:
    """Step seconds of the best split."""
    splits = sorted({max(1, min(gpus - 1, round(gpus * share))) for share in shares})
    return min(simulate(reasoning_plan(gpus, seed, training=float(n), **settings)).step_seconds for n in splits)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- figure 1b


def _scaling(seed: int) -> dict[str, float]:
    out = {}
    for name, law in (("think", THINKING), ("base", BASE)):
        for gpus in _GPUS:
            together = reasoning_plan(gpus, seed, training=0, law=law, depth=0, prompts=16)
            out[f"rounds {name} {gpus}"] = 1 / round_seconds(together, 4)
            out[f"tasks {name} {gpus}"] = 1 / simulate(together).step_seconds
            out[f"ahead {name} {gpus}"] = 1 / _best(gpus, seed, (0.3,), law=law, prompts=16)
    return out


def _tell_scaling(found: Mapping[str, float]) -> Result:
    rows = []
    for name, paper in (("think", 2.13), ("base", 2.24)):
        ours = found[f"ahead {name} 16"] / found[f"rounds {name} 16"]
        rows.append(Row(f"throughput at depth 1 over rounds, 8 x GPUs, {name}", ours, paper))
    rows.append(
        Row("throughput at 8 x GPUs over 1 x, depth 1, think", found["ahead think 16"] / found["ahead think 2"], 7.6)
    )
    rows.append(Row("the same in rounds, think", found["rounds think 16"] / found["rounds think 2"]))
    gain = found["tasks think 16"] / found["rounds think 16"]
    rows.append(Row("throughput of synchronous tasks over rounds, think", gain, None, "queue and replication alone"))
    charts = []
    for name in ("think", "base"):
        base = found[f"rounds {name} 2"]
        lines = {
            kind: [(float(g), found[f"{kind} {name} {g}"] / base) for g in _GPUS]
            for kind in ("rounds", "tasks", "ahead")
        }
        charts.append(Chart(f"Figure 1b: throughput over GPUs, {name}", lines=lines))
    return Result(rows, charts)


# ------------------------------------------------------------------------------------------------ figures 3a, 3b


def _splits(seed: int) -> dict[str, float]:
    gpus = 10
    together = reasoning_plan(gpus, seed, training=0, depth=0, prompts=16)
    out = {"rounds": round_seconds(together, 4)}
    for training in _TRAINING:
        out[f"{training}"] = simulate(reasoning_plan(gpus, seed, training=training, prompts=16)).step_seconds
    for prompts in _PROMPTS:
        rounds = reasoning_plan(gpus, seed, training=0, prompts=prompts, depth=0)
        out[f"rounds of {prompts}"] = round_seconds(rounds, 4)
        out[f"ahead of {prompts}"] = simulate(reasoning_plan(gpus, seed, training=2, prompts=prompts)).step_seconds
    return out


def _tell_splits(found: Mapping[str, float]) -> Result:
    best = min(_TRAINING, key=lambda n: found[f"{n}"])
    rows = [
        Row("speed-up of the best split of 40 GPUs", found["rounds"] / found[f"{best}"], 2.0, "3a; 10 GPUs here"),
        Row("training GPUs of the best split, of 40", 4.0 * best, 16),
        Row("speed-up at 16 training, 24 rollout", found["rounds"] / found["4"], 2.0, "the paper's split"),
        Row("speed-up at 32 training, 8 rollout", found["rounds"] / found["8"]),
    ]
    for prompts in (8, 32):
        ours = found[f"rounds of {prompts}"] / found[f"ahead of {prompts}"]
        rows.append(Row(f"speed-up at a batch of {8 * prompts} prompts", ours, None, "3b; an eighth here"))
    lines = {
        "rounds": [(8.0 * p, found[f"rounds of {p}"]) for p in _PROMPTS],
        "depth 1": [(8.0 * p, found[f"ahead of {p}"]) for p in _PROMPTS],
    }
    split = {"depth 1": [(4.0 * n, found["rounds"] / found[f"{n}"]) for n in _TRAINING]}
    return Result(
        rows,
        [Chart("Figure 3a: speed-up over GPUs for training", lines=split),
         Chart("Figure 3b: seconds a step over prompts of a batch", lines=lines)],
    )  # fmt: skip


# ----------------------------------------------------------------------------------- figure 11, everything together


def agentic_plan(seed: int, *, depth: float, spare: bool, training: float = 0.0) -> Plan:
    """Household episodes: 20 turns, environments that answer late and sometimes not at all, GPUs as in the text."""
    gpus = 8
    return Plan(
        work=Work(
            batch_groups=16, group_size=16, turns=20, length=Law(law="lognormal", mean=150, sigma=0.3),
            environment=Law(law="lognormal", mean=4, sigma=0.3), fail_stop=0.0005,
        ),
        machines=Machines(
            engines=gpus - int(training), slots=128, step_seconds=0.012, row_seconds=0.00012,
            trainer_gpus=training or gpus, train_sample_seconds=3.1, publish_seconds=2, swap_seconds=0.1,
            load_seconds=2,
        ),
        flow=Flow(
            depth=depth, max_staleness=4 if depth else -1, task_deadline_seconds=300, extra_groups=2 if spare else 0,
            extra_replicas=1 if spare else 0,
        ),
        steps=6 if depth else 3, warm_up=2 if depth else 1, seed=seed,
    )  # fmt: skip


def _turn_barriers(plan: Plan, batches: int) -> float:
    """Mean step where every turn waits for the slowest environment and answer; one that hangs, to the deadline."""
    draws, machines, work = Draws(plan), plan.machines, plan.work
    total = 0.0
    for batch in range(batches):
        groups = [draws.group(batch * work.batch_groups + i) for i in range(work.batch_groups)]
        rows = len(groups) * work.group_size / machines.engines
        token = machines.step_seconds + machines.row_seconds * rows
        answers = np.concatenate([g.tokens for g in groups]).max(axis=0) * token
        environments = np.concatenate([g.environment for g in groups]).max(axis=0)
        hung = set(np.concatenate([g.hangs_in for g in groups]).tolist())
        elapsed = 0.0
        for turn in range(work.turns):
            elapsed += float(answers[turn] + environments[turn])
            if turn in hung:
                elapsed = max(elapsed, plan.flow.task_deadline_seconds)
        total += elapsed + machines.train_sample_seconds * len(groups) * work.group_size / machines.trainer_gpus
    return total / batches + machines.publish_seconds


def _environments(seed: int) -> dict[str, float]:
    sync = agentic_plan(seed, depth=0, spare=False)
    return {
        "lockstep": _turn_barriers(sync, 4),
        "tasks": simulate(sync).step_seconds,
        "tasks spare": simulate(agentic_plan(seed, depth=0, spare=True)).step_seconds,
        "ahead": simulate(agentic_plan(seed, depth=1, spare=False, training=5)).step_seconds,
        "ahead spare": simulate(agentic_plan(seed, depth=1, spare=True, training=5)).step_seconds,
    }


def _tell_environments(found: Mapping[str, float]) -> Result:
    paper = {"tasks": 1.58, "tasks spare": 13.37 / 7.85, "ahead": 13.37 / 5.87, "ahead spare": 2.72}
    names = {
        "tasks": "episodes by themselves", "tasks spare": "and spare ones", "ahead": "depth 1",
        "ahead spare": "depth 1 and spare ones",
    }  # fmt: skip
    rows = [Row(f"speed-up, {names[k]}", found["lockstep"] / found[k], value) for k, value in paper.items()]
    bars = {row.name.removeprefix("speed-up, "): row.ours for row in rows}
    return Result(rows, [Chart("Figure 11: speed-up over lockstep, household work", bars=bars)])


def combined(seed: int) -> dict[str, float]:
    """Everything together against synchronous: speed-ups of the two kinds of work."""
    together = reasoning_plan(16, seed, training=0, depth=0)
    ahead = simulate(agentic_plan(seed, depth=2, spare=True, training=5)).step_seconds
    return {
        "rlvr": round_seconds(together, 4) / _best(16, seed, (0.3,), depth=2),
        "agentic": _turn_barriers(agentic_plan(seed, depth=0, spare=False), 4) / ahead,
    }


def _tell_combined(found: Mapping[str, float]) -> Result:
    return Result([Row(f"speed-up, {kind}", found[kind], paper) for kind, paper in _STATED.items()])


CLUSTERS = (
    Study(
        "fig1b", "Figure 1b: throughput over GPUs",
        "Rounds stop scaling when the longest answer takes most of a step; at depth 1 it is waited for by nobody.",
        _scaling, _tell_scaling,
    ),
    Study(
        "fig3", "Figures 3a and 3b: how GPUs are split, and batch sizes",
        "Rollouts and training share no GPU, so the split is the user's: `headrace simulate size` looks for the best.",
        _splits, _tell_splits,
    ),
    Study(
        "fig11", "Figure 11: environments on household work",
        "All of it together: episodes by themselves, spare groups and replicas, rollouts ahead of training.",
        _environments, _tell_environments,
    ),
    Study(
        "combined", "Everything together against synchronous",
        "Candidates as tasks, a queue, late binding and depth 1; spare groups and replicas where environments fail.",
        combined, _tell_combined,
    ),
)  # fmt: skip
"""Studies of this module."""
