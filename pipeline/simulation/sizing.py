"""How large a cluster should be: throughput and staleness for every split of the GPUs and a few depths.

In: a Plan (lengths, latencies, decode speed, training time), a number of GPUs; out: a row for each choice, the best
marked. Best is the highest throughput; among those within 3 % of it the lowest mean staleness, then the fewest GPUs.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from headrace.pipeline.simulation.measure import Outcome
from headrace.pipeline.simulation.plan import Plan
from headrace.pipeline.simulation.world import simulate
from headrace.schemas.errors import ConfigurationError

__all__ = ("Choice", "best_of", "choices", "compare")

_NEAR = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A split and a depth, and what it gives: means over the seeds."""

    rollout_gpus: int
    trainer_gpus: int
    depth: float
    steps_per_hour: float
    samples_per_second: float
    tokens_per_second: float
    mean_staleness: float
    max_staleness: int
    wait_share: float
    busy_share: float
    length_ratio: float
    started_share: float


def choices(gpus: int, splits: int, depths: Sequence[float]) -> Iterator[tuple[int, int, float]]:
    """(rollout GPUs, trainer GPUs, depth), at most ``splits`` splits, evenly over what is possible.

    Raises ConfigurationError for fewer than two GPUs.
    """
    if gpus < 2:
        raise ConfigurationError(f"{gpus} GPUs cannot be split between rollouts and training")
    trainers = sorted({max(1, round(i * gpus / (splits + 1))) for i in range(1, splits + 1)} - {gpus})
    for trainer in trainers:
        for depth in depths:
            yield gpus - trainer, trainer, depth


def compare(plan: Plan, asked: Sequence[tuple[int, int, float]], seeds: Sequence[int], jobs: int = 0) -> list[Choice]:
    """Simulate every choice with every seed; the plan's own number of engines, trainer GPUs and depth do not count."""
    work = [(plan, *one, seed) for one in asked for seed in seeds]
    if jobs == 1:
        found = [_played(one) for one in work]
    else:
        with ProcessPoolExecutor(jobs or None) as pool:
            found = list(pool.map(_played, work))
    each = len(seeds)
    return [_mean(one, found[i * each : (i + 1) * each]) for i, one in enumerate(asked)]


def best_of(found: Sequence[Choice]) -> Choice:
    """The choice to take."""
    most = max(choice.samples_per_second for choice in found)
    near = [choice for choice in found if choice.samples_per_second >= _NEAR * most]
    return min(near, key=lambda c: (c.mean_staleness, c.rollout_gpus + c.trainer_gpus, -c.samples_per_second))


def _played(asked: tuple[Plan, int, int, float, int]) -> Outcome:
    plan, rollout, trainer, depth, seed = asked
    bound = plan.flow.max_staleness if depth and plan.flow.max_staleness >= depth else -1
    return simulate(
        plan.with_(
            machines={"engines": rollout, "trainer_gpus": trainer}, flow={"depth": depth, "max_staleness": bound},
            seed=seed,
        )
    )  # fmt: skip


def _mean(asked: tuple[int, int, float], found: Sequence[Outcome]) -> Choice:
    def mean(name: str) -> float:
        return sum(float(getattr(one, name)) for one in found) / len(found)

    return Choice(
        rollout_gpus=asked[0], trainer_gpus=asked[1], depth=asked[2], steps_per_hour=3600 / mean("step_seconds"),
        samples_per_second=mean("samples_per_second"), tokens_per_second=mean("tokens_per_second"),
        mean_staleness=mean("mean_staleness"), max_staleness=max(one.max_staleness for one in found),
        wait_share=mean("wait_share"), busy_share=mean("busy_share"), length_ratio=mean("length_ratio"),
        started_share=mean("started_share"),
    )  # fmt: skip
