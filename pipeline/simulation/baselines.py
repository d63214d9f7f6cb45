"""What the papers compare with: synchronous rounds, turns in lockstep, candidates on one engine, consumption in order.

Plain models over the same draws, none of them the product. Times in seconds.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.pipeline.simulation.draws import Draws, GroupDraw
from headrace.pipeline.simulation.plan import Plan

__all__ = (
    "InOrder",
    "batch_rounds",
    "in_order",
    "list_schedule",
    "lockstep",
    "one_after_the_other",
    "one_engine_per_prompt",
    "rows_seconds",
)

Floats = npt.NDArray[np.float64]


def lockstep(groups: Sequence[GroupDraw]) -> float:
    """All environments of a batch step together: the slowest of every turn is waited for."""
    whole = np.concatenate([group.environment for group in groups])
    return float(whole.max(axis=0).sum())


def rows_seconds(tokens: Floats, step_seconds: float, row_seconds: float) -> float:
    """Time until an engine that starts all these sequences at once has ended the last one.

    >>> rows_seconds(np.array([2.0, 5.0]), 1.0, 0.5)
    8.5
    """
    ordered = np.sort(tokens)
    rows = np.arange(len(ordered), 0, -1)
    return float((np.diff(ordered, prepend=0.0) * (step_seconds + row_seconds * rows)).sum())


def one_engine_per_prompt(plan: Plan, groups: Sequence[GroupDraw]) -> float:
    """All candidates of a prompt are decoded by one engine; prompts are dealt out in turn."""
    machines = plan.machines
    loads: list[list[Floats]] = [[] for _ in range(machines.engines)]
    for number, group in enumerate(groups):
        loads[number % machines.engines].append(group.lengths())
    return max(
        rows_seconds(np.concatenate(load), machines.step_seconds, machines.row_seconds) for load in loads if load
    )


def batch_rounds(plan: Plan, draws: Draws, batches: int) -> float:
    """Mean time of a batch by rounds: draw a batch of prompts, wait for all, filter, until enough are kept (D4).

    Engines are unlimited; what a last round has too many is thrown away, as the paper's baseline does.
    """
    number, total = 0, 0.0
    for _ in range(batches):
        kept = 0
        while kept < plan.work.batch_groups:
            drawn = [draws.group(number + i) for i in range(plan.work.batch_groups)]
            number += len(drawn)
            total += max(float(group.lengths().max()) for group in drawn) * plan.machines.step_seconds
            kept += sum(group.passes for group in drawn)
    return total / batches


def list_schedule(seconds: Floats, machines: int) -> float:
    """Time until the last of these tasks ends, each given in order to the first free machine.

    >>> list_schedule(np.array([2.0, 2.0, 3.0]), 2)
    5.0
    """
    free = [0.0] * machines
    heapq.heapify(free)
    for length in seconds:
        heapq.heappush(free, heapq.heappop(free) + float(length))
    return max(free)


def one_after_the_other(plan: Plan, batches: int) -> float:
    """Mean step of a plan at depth 0 without topics: each batch on all slots in turn, then training.

    Groups of one trajectory; the product's depth 0 is as long but for its records' way.
    """
    machines, work = plan.machines, plan.work
    rng = np.random.Generator(np.random.PCG64([plan.seed, 78]))
    lengths = work.length.draw(rng, (batches, work.batch_groups)) * machines.step_seconds
    slots = machines.engines * machines.slots
    return machines.train_seconds + sum(list_schedule(batch, slots) for batch in lengths) / batches


class InOrder:
    """ROLL's buffer: a budget of (1 + alpha) batches, consumed by start version, oldest first."""

    def __init__(self, lengths: Floats, *, batch: int, machines: int, alpha: int, train_seconds: float) -> None:
        self._lengths = lengths
        self._batch = batch
        self._machines = machines
        self._alpha = alpha
        self._train = train_seconds

    def step_seconds(self, steps: int, warm_up: int) -> float:
        """Mean time of a step. A batch is the samples that were started first; the trainer waits for each of them."""
        free = [0.0] * self._machines
        trained = [0.0]
        for step in range(steps):
            opened, ready = trained[max(0, step - self._alpha)], 0.0
            for length in self._lengths[step * self._batch : (step + 1) * self._batch]:
                ended = max(heapq.heappop(free), opened) + float(length)
                heapq.heappush(free, ended)
                ready = max(ready, ended)
            trained.append(max(trained[step], ready) + self._train)
        return (trained[-1] - trained[warm_up]) / (steps - warm_up)


def in_order(plan: Plan, alpha: int) -> float:
    """Mean time of a step of a plan's work under ROLL's buffer, groups of one trajectory."""
    work, machines = plan.work, plan.machines
    rng = np.random.Generator(np.random.PCG64([plan.seed, 77]))
    lengths = work.length.draw(rng, work.batch_groups * plan.steps) * machines.step_seconds
    rule = InOrder(
        lengths, batch=work.batch_groups, machines=machines.engines * machines.slots, alpha=alpha,
        train_seconds=machines.train_seconds,
    )  # fmt: skip
    return rule.step_seconds(plan.steps, plan.warm_up)
