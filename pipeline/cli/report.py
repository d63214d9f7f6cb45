"""``headrace report``: the figures of a run, from its report or, where there is none, from its topics."""

import json
import sys
from typing import Annotated

import typer

from headrace.pipeline.cli.arguments import Bootstrap, Folder, Format, Output, command_group, print_json

__all__ = ("app",)

app = command_group("Figures and curves of a run.")


@app.command()
def report(
    folder: Folder,
    output: Output = Format.text,
    fresh: Annotated[bool, typer.Option("--fresh", help="Work the figures out again and write both files.")] = False,
    bootstrap: Bootstrap = "",
) -> None:
    """Print the figures of a run; runs/ID/report.html shows them with curves."""
    from headrace.pipeline.launch.folder import RunFolder

    run = RunFolder.existing(folder)
    if fresh or not run.report_json.exists():
        from headrace.connectors.kafka import Connection
        from headrace.pipeline.launch.local_broker import broker_of
        from headrace.pipeline.report import write_report

        sys.stderr.write("reading the run's topics\n")
        config = run.read_config()
        with broker_of(run, bootstrap) as address:
            write_report(run, Connection.of(config.kafka, config.run.id, address))
    figures = json.loads(run.report_json.read_text("utf-8"))
    if output is Format.json:
        print_json(figures)
        return
    for name, value in figures.items():
        if name not in ("curves", "samples"):
            sys.stdout.write(f"{name:28} {_shown(value)}\n")
    sys.stderr.write(f"curves and samples: {run.report_html}\n")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items() if k != "curves") or "none"
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)
