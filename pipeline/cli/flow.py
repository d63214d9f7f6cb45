"""``headrace flow``: the topology of a configuration, or of every run when none is given."""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from headrace.pipeline.cli.arguments import command_group, compositions, print_json

__all__ = ("app",)

app = command_group("The path of the data: stages, topics, records.", nested=True)


class FlowFormat(StrEnum):
    """How the topology is printed."""

    text = "text"
    mermaid = "mermaid"
    json = "json"


@app.command()
def show(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[@ FILE ... [KEY=VALUE ...]]", help="A configuration to show.")
    ] = None,
    output: Annotated[
        FlowFormat, typer.Option("--format", help="text for people, a Mermaid chart, or JSON for programs.")
    ] = FlowFormat.text,
) -> None:
    """Print topics, stages and, for a configuration, its operators; refuses what could not work."""
    from headrace.pipeline.flow import describe, validate
    from headrace.pipeline.flow_chart import as_data, as_mermaid
    from headrace.schemas.config import load_config

    config = None
    if words:
        config = load_config(*compositions(words))
        validate(config)
    if output is FlowFormat.json:
        print_json(as_data(config))
    else:
        sys.stdout.write((as_mermaid if output is FlowFormat.mermaid else describe)(config) + "\n")
