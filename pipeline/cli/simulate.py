"""``headrace simulate``: the papers' figures by the product's scheduler in virtual time, and how to size a cluster."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json, print_table
from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.pipeline.simulation.plan import Plan
    from headrace.pipeline.simulation.sizing import Choice
    from headrace.pipeline.simulation.study import Result, Study

__all__ = ("app",)

app = command_group("Runs in virtual time: the papers' figures, and the size of a cluster.", nested=True)

Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Seeds to average over.")]
Jobs = Annotated[int, typer.Option("--jobs", min=0, help="Simulations at a time; 0: one for each core.")]
Page = Annotated[str, typer.Option("--html", metavar="FILE", help="Also write tables and charts as one page.")]


@app.command("list")
def list_studies(output: Output = Format.text) -> None:
    """The figures that can be made again."""
    from headrace.pipeline.simulation.catalogue import STUDIES

    if output is Format.json:
        print_json([{"name": s.name, "title": s.title, "why": s.why} for s in STUDIES.values()])
    else:
        print_table(("name", "figure"), [(s.name, s.title) for s in STUDIES.values()])


@app.command()
def paper(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME ...]", help="Names by `simulate list`.")] = None,
    seeds: Seeds = 3,
    jobs: Jobs = 0,
    html: Page = "",
    output: Output = Format.text,
) -> None:
    """Make figures of the papers again: paper, ours, ratio. Without names all of them."""
    from headrace.pipeline.simulation.catalogue import STUDIES
    from headrace.pipeline.simulation.page import studies_page

    unknown = [name for name in names or () if name not in STUDIES]
    if unknown:
        raise ConfigurationError(f"no figure is called {', '.join(unknown)}; there are {', '.join(STUDIES)}")
    found: list[tuple[Study, Result]] = []
    for study in [STUDIES[name] for name in names] if names else STUDIES.values():
        began = time.monotonic()
        found.append((study, study.run(range(seeds), jobs)))
        sys.stderr.write(f"{study.name}: {time.monotonic() - began:.0f} s\n")
        if output is Format.text:
            _print_study(*found[-1])
    if html:
        Path(html).write_text(studies_page(found, seeds), "utf-8")
        sys.stderr.write(f"charts: {html}\n")
    if output is Format.json:
        print_json({study.name: [_plain(row) for row in result.rows] for study, result in found})


@app.command()
def size(
    files: Annotated[list[str], typer.Argument(metavar="FILE.toml [KEY=VALUE ...]", help="The plan, and overrides.")],
    gpus: Annotated[int, typer.Option("--gpus", min=2, help="GPUs to split between rollouts and training.")] = 8,
    splits: Annotated[int, typer.Option("--splits", min=1, help="Splits to try.")] = 5,
    depths: Annotated[str, typer.Option("--depths", help="Depths to try, by commas.")] = "0,1,2",
    seeds: Seeds = 1,
    jobs: Jobs = 0,
    html: Page = "",
    output: Output = Format.text,
) -> None:
    """Throughput and staleness of every split and depth for your lengths and latencies, and which to take."""
    from dataclasses import asdict

    from headrace.pipeline.simulation.page import sizing_page
    from headrace.pipeline.simulation.sizing import best_of, choices, compare

    try:
        wanted = [float(word) for word in depths.split(",")]
    except ValueError:
        raise ConfigurationError(f"--depths {depths!r} is not numbers with commas between") from None
    plan = _plan(files)
    found = compare(plan, list(choices(gpus, splits, wanted)), range(plan.seed, plan.seed + seeds), jobs)
    best = best_of(found)
    if html:
        Path(html).write_text(sizing_page(found, best), "utf-8")
        sys.stderr.write(f"charts: {html}\n")
    if output is Format.json:
        print_json({"best": asdict(best), "choices": [asdict(choice) for choice in found]})
        return
    _print_choices(found, best)


def _plan(words: list[str]) -> "Plan":
    """A plan from TOML files and ``key=value`` overrides. Raises ConfigurationError that names the key."""
    from pydantic import ValidationError

    from headrace.pipeline.simulation.plan import Plan
    from headrace.schemas.config import read_sections

    data: dict[str, Any] = read_sections(
        [word for word in words if "=" not in word], [word for word in words if "=" in word]
    )
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'plan'}: {e['msg']}" for e in error.errors()]
        raise ConfigurationError("\n".join(lines)) from error


def _print_study(study: "Study", result: "Result") -> None:
    sys.stdout.write(f"{study.title}\n")
    rows = [
        (row.name, _shown(row.paper), _shown(row.ours), "" if row.ratio is None else f"{row.ratio:.2f}", row.note)
        for row in result.rows
    ]
    print_table(("", "paper", "ours", "ratio", ""), rows)
    sys.stdout.write(f"{study.why}\n\n")
    sys.stdout.flush()


def _print_choices(found: "list[Choice]", best: "Choice") -> None:
    rows = [
        ("*" if c is best else "", c.rollout_gpus, c.trainer_gpus, c.depth, round(c.steps_per_hour, 1),
         round(c.samples_per_second, 3), round(c.tokens_per_second), round(c.mean_staleness, 2), c.max_staleness,
         f"{c.wait_share:.0%}", f"{c.busy_share:.0%}", round(c.length_ratio, 2))
        for c in found
    ]  # fmt: skip
    print_table(
        ("", "rollout", "training", "depth", "steps/h", "samples/s", "tokens/s", "staleness", "max", "waits", "busy",
         "length"), rows,
    )  # fmt: skip
    sys.stdout.write(
        f"\nbest: {best.rollout_gpus} GPUs for rollouts, {best.trainer_gpus} for training, depth {best.depth:g}\n"
    )


def _plain(row: Any) -> dict[str, Any]:
    return {"name": row.name, "paper": row.paper, "ours": row.ours, "ratio": row.ratio, "note": row.note}


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
