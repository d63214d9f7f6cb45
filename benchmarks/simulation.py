"""The product's scheduler in virtual time against the figures of the papers: means over seeds (20; 2 with --quick).

    python -m benchmarks.simulation [--quick] [--json FILE] [--seeds N] [--jobs N]

Latencies and lengths are the papers', or fitted on named figures (docs/simulation.md); `headrace simulate
paper` shows everything behind a figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping

from benchmarks.form import Figure, main
from headrace.pipeline.simulation.agentic import environment_speeds, redundancy_speeds
from headrace.pipeline.simulation.asynchrony import bound_violations, depth_speeds
from headrace.pipeline.simulation.clusters import combined
from headrace.pipeline.simulation.pools import autoscale, three_speeds, two_policies
from headrace.pipeline.simulation.rollouts import queue_speeds, replication_speeds
from headrace.pipeline.simulation.study import means

CASES, PARTS_OF_CASES = 1000, 20
"""Random cases of the propositions, and how many parts they are played in."""

Means = Mapping[str, float]


def environments(found: Means) -> Iterator[Figure]:
    """Figure 9."""
    yield Figure("env_async_speedup", found["lockstep 10,10"] / found["ours 10,10"], "", 2.3, anchor="paper 2.46")
    yield Figure(
        "env_async_depth1_speedup", found["lockstep 10,10"] / found["free 10,10"], "", anchor="no batch barrier"
    )


def redundancy(found: Means) -> Iterator[Figure]:
    """Figure 10."""
    yield Figure("redundancy_speedup", found["0,0"] / found["4,4"], "", 4.7, anchor="paper 5.45; 36 x 12 over 32 x 8")
    yield Figure("redundancy_tasks_started", found["started 4,4"], "", anchor="for each trained")


def queue(found: Means) -> Iterator[Figure]:
    """Figure 7."""
    yield Figure("queue_speedup", found["rounds"] / found["16"], "", 3.3, anchor="paper 3.4; 8 x 8 + 16")
    yield Figure("queue_length_bias", found["length 16"], "", anchor="trained length over all; 1 is none")
    yield Figure("queue_tokens_started", found["started 16"], "", anchor="for each trained")
    yield Figure("queue_exact_speedup", found["rounds"] / found["16 exact"], "", anchor="exact_refill")
    yield Figure("queue_exact_length_bias", found["length 16 exact"], "")


def replication(found: Means) -> Iterator[Figure]:
    """Figure 8."""
    speed = found["together 16x64"] / found["ours 16x64"]
    yield Figure("replication_speedup", speed, "", 1.75, anchor="paper 1.84; 16 x 64")
    yield Figure("replication_64x16_speedup", found["together 64x16"] / found["ours 64x16"], "", anchor="paper 1.84")


def depth(found: Means) -> Iterator[Figure]:
    """D6."""
    yield Figure("depth_speedup", found["1,4,wait"], "", 3.3, anchor="ROLL's rule at alpha 1: 1.92")
    yield Figure("depth_mean_staleness", found["mean 1,4,wait"], "", anchor="1 by conservation")
    yield Figure("depth_max_staleness", found["max 1,4,wait"], "", 4, False, "A")


def policies(found: Means) -> Iterator[Figure]:
    """AstraFlow, Table 2."""
    yield Figure("two_policy_speedup", found["in turn"] / found["ahead"], "", 2.7, anchor="paper 212.64 / 77.65 = 2.74")
    yield Figure("two_policy_step", found["ahead"], "s", anchor="paper 77.65")


def pool(found: Means) -> Iterator[Figure]:
    """AstraFlow, heterogeneous pool."""
    yield Figure("three_speed_share", found["pool"] / found["sum"], "", 0.95, anchor="of the sum of single rates")


def resized(found: Means) -> Iterator[Figure]:
    """AstraFlow, Table 4."""
    saved = 1 - found["scaled total"] / found["fixed 11 total"]
    yield Figure("autoscale_gpu_hours_saved", saved, "", 0.13, anchor="paper 0.131; against fixed 11")
    ratio = found["scaled wall"] / found["fixed 11 wall"]
    yield Figure("autoscale_wall_ratio", ratio, "", 1.02, False, "paper 1.021")
    yield Figure("autoscale_wait_fixed6", found["fixed 6 waits"], "", anchor="paper 0.269, fitted")
    yield Figure("autoscale_wait_fixed11", found["fixed 11 waits"], "", anchor="paper 0.021, fitted")


def together(found: Means) -> Iterator[Figure]:
    """Everything against synchronous."""
    yield Figure("combined_speedup", found["rlvr"], "", anchor="paper 2.24 (RLVR)")
    yield Figure("combined_agentic_speedup", found["agentic"], "", anchor="paper 2.72 (agentic)")


def bounds(found: Means) -> Iterator[Figure]:
    """Propositions 1 and 2; every part is one of many, so their counts add up."""
    cases = found["cases"] * PARTS_OF_CASES
    yield Figure("bound_violations", found["violations"] * PARTS_OF_CASES, "", 0, False, f"{cases:g} random cases")
    yield Figure("bound_used", found["worst"], "", anchor="largest share of a bound that was used, mean of 20 parts")


PARTS: Mapping[str, tuple[Callable[[int], Means], Callable[[Means], Iterator[Figure]]]] = {
    "env": (environment_speeds, environments),
    "redundancy": (redundancy_speeds, redundancy),
    "queue": (queue_speeds, queue),
    "replication": (replication_speeds, replication),
    "depth": (depth_speeds, depth),
    "two_policy": (two_policies, policies),
    "three_speed": (three_speeds, pool),
    "autoscale": (autoscale, resized),
    "combined": (combined, together),
}
"""Name -> (numbers of one seed, figures of their means)."""


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """Every part over all seeds."""
    seeds = range(given.seeds or (2 if given.quick else 20))
    for name, (numbers, figures) in PARTS.items():
        if given.only in ("", name):
            yield from figures(means(numbers, seeds, given.jobs))
    if given.only in ("", "bound"):
        yield from bounds(means(bound_sample if given.quick else bound_share, range(PARTS_OF_CASES), given.jobs))


def bound_share(part: int) -> Means:
    """A twentieth of the random cases."""
    return bound_violations(part, CASES // PARTS_OF_CASES)


def bound_sample(part: int) -> Means:
    """A few of them."""
    return bound_violations(part, 3)


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--only", default="", choices=["", *PARTS, "bound"], help="measure one part")
    parser.add_argument("--seeds", type=int, default=0, help="seeds to average over (20)")
    parser.add_argument("--jobs", type=int, default=0, help="simulations at a time (one for each core)")


if __name__ == "__main__":
    main(__doc__, measure, options)
