"""What do data algorithms save? Held-out accuracy and rollouts of six variants at equal trained samples, over 3 seeds.

Figure 18 of the AstraFlow paper in miniature, on the recipe `data_algorithms`: its stages with their operators, its
engine and its trainer in one process, so that counts are exact (see `data_algorithms_run`). Finished runs are kept in
--keep FOLDER and not repeated; --plot FILE draws accuracy over rollouts; --json as for all, `--quick` is one seed and
two batches. About 15 seconds of processor time a run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from benchmarks.data_algorithms_run import DataRun
from benchmarks.form import Figure, main
from benchmarks.losses import warm_start
from headrace.schemas.config import load_config

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "data_algorithms"
VARIANTS = ("vanilla", "dynamic_sampling", "replay_0.3", "replay_0.5", "replay_0.7", "greso")
SEEDS = (0, 1, 2)
BASELINE = "dynamic_sampling"
BATCHES, BATCH_SAMPLES = 24, 256
COLOURS = ("#666666", "#1f6fb4", "#9ccc65", "#43a047", "#1b5e20", "#d84315")
Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def play(variant: str, seed: int, warm: Path, batches: int) -> dict[str, Any]:
    """The figures of one run that trains so many full batches."""
    overrides = [
        f"run.seed={seed}", f"policies.main.model={warm}", f"streams.main.dataset={RECIPE / 'train.jsonl'}",
        f"trainer.max_samples={batches * BATCH_SAMPLES}",
    ]  # fmt: skip
    config = load_config([RECIPE / "run.toml", RECIPE / f"{variant}.toml"], overrides)
    return DataRun(config, warm).play(eval_every=max(1, batches // 3))


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """Run what is missing, tell the table, draw the plot."""
    seeds = given.seeds[:1] if given.quick else given.seeds
    batches = 2 if given.quick else given.batches
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        runs: dict[str, list[Mapping[str, Any]]] = {name: [] for name in given.variants}
        for seed in seeds:
            for name in given.variants:
                kept = folder / f"{name}-s{seed}-{batches}.json"
                if not kept.exists():
                    made = play(name, seed, warm_start(folder, seed), batches)
                    kept.write_text(json.dumps(made), "utf-8")
                runs[name].append(json.loads(kept.read_text("utf-8")))
                shown = {k: v for k, v in runs[name][-1].items() if k != "curve"}
                print(f"{kept.stem}: {json.dumps(shown)}", file=sys.stderr)
    if given.plot:
        given.plot.write_text(plot(runs), "utf-8")
    yield from figures(runs)


def figures(runs: Runs) -> Iterator[Figure]:
    """Means over seeds, and what each variant saves against dynamic sampling."""
    for name, made in runs.items():
        accuracies = [run["accuracy"] for run in made]
        spread = f"{len(made)} seeds, deviation {pstdev(accuracies):.3f}; started from {fmean(_started(made)):.3f}"
        yield Figure(f"{name}_accuracy", fmean(accuracies), anchor=spread)
        dropped = f"{fmean(r['filtered_groups'] for r in made):.0f} groups dropped after rollout"
        skipped = f"{fmean(r['skipped_prompts'] for r in made):.0f} prompts skipped before"
        trained = f"{fmean(r['trained'] for r in made):.0f} trained"
        yield Figure(f"{name}_rollouts", fmean(r["rollouts"] for r in made), anchor=f"{trained}, {dropped}, {skipped}")
    base = runs.get(BASELINE, ())
    if not base or "vanilla" not in runs:
        return
    rollouts, accuracy = (fmean(run[key] for run in base) for key in ("rollouts", "accuracy"))
    raised = rollouts / fmean(run["rollouts"] for run in runs["vanilla"])
    yield Figure("dynamic_sampling_raises", raised, "x", target=1.0, anchor="rollouts of vanilla")
    for name, target in (("greso", 0.18), ("replay_0.5", 0.4)):
        if runs.get(name):
            saved = 1 - fmean(run["rollouts"] for run in runs[name]) / rollouts
            yield Figure(f"{name}_saves", saved, target=target, anchor="share of the rollouts of dynamic sampling")
            lost = accuracy - fmean(run["accuracy"] for run in runs[name])
            bar = 0.05 if name == "greso" else None
            yield Figure(f"{name}_loses", lost, target=bar, at_least=False, anchor="accuracy of dynamic sampling")


def _started(made: Sequence[Mapping[str, Any]]) -> list[float]:
    return [run["curve"][0][1] for run in made]


def plot(runs: Runs) -> str:
    """Accuracy over rollouts as SVG: one line a variant, the mean over seeds at each evaluation."""
    curves = {name: _mean_curve([run["curve"] for run in made]) for name, made in runs.items() if made}
    right = max(x for curve in curves.values() for x, _ in curve) or 1.0
    top = max(y for curve in curves.values() for _, y in curve) or 1.0
    shapes = ['<path d="M50 10V250H590" fill="none" stroke="black"/>']
    for tick in range(5):
        y, x = 250 - 60 * tick, 50 + 135 * tick
        shapes.append(f'<text x="44" y="{y + 4}" text-anchor="end">{top * tick / 4:.2f}</text>')
        shapes.append(f'<text x="{x}" y="266" text-anchor="middle">{right * tick / 4:.0f}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[VARIANTS.index(name)]
        points = " ".join(f"{50 + 540 * x / right:.1f},{250 - 240 * y / top:.1f}" for x, y in curve)
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        shapes.append(f'<text x="600" y="{20 + 16 * number}" fill="{colour}">{escape(name)}</text>')
    shapes.append('<text x="320" y="284" text-anchor="middle">rollouts</text>')
    body = "\n".join(shapes)
    font = 'font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 730 290" {font}>\n{body}\n</svg>\n'


def _mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, float]]:
    points = zip(*curves, strict=False)
    return [(fmean(p[0] for p in at), fmean(p[1] for p in at)) for at in points]


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds of model, order and samples")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="variants to compare")
    parser.add_argument("--batches", type=int, default=BATCHES, help="full batches of 256 samples that each run trains")
    parser.add_argument("--keep", default="", metavar="FOLDER", help="keep finished runs here, and reuse them")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw accuracy over rollouts as SVG")


if __name__ == "__main__":
    main(__doc__, measure, options)
