"""Does the recipe learn, whichever backend and depth it runs with, and what does a synchronous step lose to the topics?

Runs recipes/sort_digits with every combination of backend (DeepSpeed, plain torch), depth (0, 1) and seed (0, 1, 2) as
a person would, and reads the reports. About 2 minutes a run on two idle cores; `--quick` is one run of 20 versions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from benchmarks.form import Figure, main

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "sort_digits" / "run.toml"
BACKENDS, DEPTHS, SEEDS = ("deepspeed", "torch"), (1, 0), (0, 1, 2)


def run(parent: Path, backend: str, depth: int, seed: int, extra: list[str]) -> dict[str, float]:
    """One run of the recipe; returns its report."""
    name = f"{backend}-d{depth}-s{seed}"
    command = [
        str(Path(sys.executable).with_name("headrace")), "run", "@", str(RECIPE), f"run.folder={parent}",
        f"run.id={name}", f"run.seed={seed}", f"trainer.backend={backend}", f"policies.main.depth={depth}", *extra,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report: dict[str, float] = json.loads((parent / name / "report.json").read_text("utf-8"))
    print(
        f"{name}: {report['accuracy_start']:.3f} -> {report['accuracy_final']:.3f}, {report['wall_seconds']:.0f} s",
        file=sys.stderr,
    )
    return report


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """Run all combinations asked for."""
    quick = given.quick
    extra = ["trainer.max_steps=20"] if quick else []
    backends, depths, seeds = (BACKENDS[:1], DEPTHS[:1], SEEDS[:1]) if quick else (BACKENDS, DEPTHS, given.seeds)
    reports: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in backends:
            for depth in depths:
                reports[backend, depth] = [run(Path(folder), backend, depth, seed, extra) for seed in seeds]
    everything = [report for runs in reports.values() for report in runs]
    means = {key: fmean(r["accuracy_final"] for r in runs) for key, runs in reports.items()}
    for (backend, depth), mean in means.items():
        yield Figure(f"accuracy_final_{backend}_d{depth}", mean, anchor=f"mean over seeds {', '.join(map(str, seeds))}")
    if len(means) > 1:
        spread = max(means.values()) - min(means.values())
        yield Figure("accuracy_spread", spread, target=0.06, at_least=False, anchor="largest less smallest mean")
    gains = [r["accuracy_final"] / max(r["accuracy_start"], 1e-9) for r in everything]
    yield Figure("least_gain", min(gains), "x", target=None if quick else 2.0, anchor="accuracy of the warm start")
    yield Figure("longest_seconds", max(r["wall_seconds"] for r in everything), "s", target=240, at_least=False)
    yield Figure("peak_memory_gib", max(r["peak_memory_bytes"] for r in everything) / 2**30, "GiB")
    for backend in backends:
        if (backend, 0) in reports:
            lost = fmean(r["loop_latency_ms"] for r in reports[backend, 0])
            yield Figure(
                f"loop_latency_ms_{backend}", lost, "ms", target=150, at_least=False, anchor="a step at depth 0"
            )
            stale = max(r["max_staleness"] for r in reports[backend, 0])
            yield Figure(f"max_staleness_{backend}_d0", stale, "versions", target=0, at_least=False)


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds to run each combination with")


if __name__ == "__main__":
    main(__doc__, measure, options)
