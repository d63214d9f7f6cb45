"""Propositions 1 and 2 of ROLL Flash (arXiv 2510.11345, section 3; docs/simulation.md). Seconds."""

import math
from dataclasses import dataclass

__all__ = ("Balanced", "balanced", "rollout_bound", "step_bound", "synchronous_bound")


def rollout_bound(samples: int, machines: int, mean: float, longest: float) -> float:
    """Proposition 1: time of ``samples`` on ``machines`` by list scheduling, each at most ``longest``.

    >>> rollout_bound(8, 4, 10.0, 30.0)
    50.0
    """
    return samples * mean / machines + longest


def synchronous_bound(batch: int, machines: int, mean: float, longest: float, train_work: float) -> float:
    """Proposition 2, one after the other; ``train_work``: machine seconds to train one sample, all epochs.

    >>> synchronous_bound(256, 40, 30.0, 300.0, 10.0)
    556.0
    """
    return rollout_bound(batch, machines, mean, longest) + batch * train_work / machines


def step_bound(
    batch: int, machines: float, mean: float, longest: float, train_work: float, *, alpha: float, share: float
) -> float:
    """Proposition 2, at the same time: ``share`` (beta) of the machines trains, rollouts run ``alpha`` batches ahead.

    The slower of the two: ``N mean / ((1 - beta) K) + L / (alpha + 1)`` and ``N work / (beta K)``.
    """
    rollout = batch * mean / ((1 - share) * machines) + longest / (alpha + 1)
    return max(rollout, batch * train_work / (share * machines))


@dataclass(frozen=True, slots=True)
class Balanced:
    """The split at which both take as long, and the bound there."""

    share: float
    seconds: float


def balanced(batch: int, machines: int, mean: float, longest: float, train_work: float, alpha: float) -> Balanced:
    """The share of machines for training that makes ``step_bound`` least.

    >>> b = balanced(256, 40, 30.0, 300.0, 10.0, 2)
    >>> round(b.share, 6), round(b.seconds, 6)
    (0.189906, 337.009434)
    """
    rollout, train = batch * mean / machines, batch * train_work / machines
    tail = longest / (alpha + 1)
    whole = rollout + train + tail
    root = math.sqrt(whole**2 - 4 * train * tail)
    return Balanced(share=2 * train / (whole + root), seconds=(whole + root) / 2)
