"""Sizing: the splits that are tried, the best one, and that it is the one that theory gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.pipeline.simulation.bounds import balanced
from headrace.pipeline.simulation.plan import Plan
from headrace.pipeline.simulation.sizing import Choice, best_of, choices, compare
from headrace.schemas.errors import ConfigurationError


def choice(**over: float) -> Choice:
    given = Choice(
        rollout_gpus=4, trainer_gpus=4, depth=1, steps_per_hour=1, samples_per_second=1, tokens_per_second=1,
        mean_staleness=1, max_staleness=1, wait_share=0, busy_share=1, length_ratio=1, started_share=1,
    )  # fmt: skip
    return replace(given, **over)  # type: ignore[arg-type]


@pytest.mark.parametrize("gpus", [2, 3, 8, 13])
def test_every_split_leaves_someone_on_both_sides(gpus: int) -> None:
    tried = list(choices(gpus, 5, [0, 1]))
    assert tried and all(rollout >= 1 and trainer >= 1 and rollout + trainer == gpus for rollout, trainer, _ in tried)
    assert len(tried) == len(set(tried)) <= 10


def test_one_gpu_cannot_be_split() -> None:
    with pytest.raises(ConfigurationError, match="1 GPUs cannot be split"):
        list(choices(1, 5, [1]))


def test_among_equally_fast_ones_the_fresher_is_best() -> None:
    slow, fresh, fast = (
        choice(samples_per_second=0.9, mean_staleness=0),
        choice(samples_per_second=0.98),
        choice(mean_staleness=2),
    )
    assert best_of([slow, fast, fresh]) is fresh


def test_the_best_split_is_the_balanced_one() -> None:
    """24 samples of 30 s on one slot a GPU, 15 GPU seconds to train each: a third of the machines should train."""
    plan = Plan.model_validate(
        {
            "work": {"batch_groups": 24, "group_size": 1, "length": 30},
            "machines": {"slots": 1, "step_seconds": 1.0, "row_seconds": 0.0, "train_sample_seconds": 15.0},
            "flow": {"min_members": 1},
            "steps": 4, "warm_up": 1,
        }
    )  # fmt: skip
    found = compare(plan, [(10, 2, 2), (8, 4, 2), (2, 10, 2)], [0], jobs=1)
    best = best_of(found)
    assert best.trainer_gpus == 4
    assert balanced(24, 12, 30.0, 30.0, 15.0, 1e9).share == pytest.approx(1 / 3)
    assert best.samples_per_second == pytest.approx(8 / 30, rel=0.12)
    assert found[2].wait_share > 0.8 > 0.1 > found[0].wait_share
