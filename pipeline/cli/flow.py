"""``headrace flow``: the topology of a configuration, or of every run when none is given."""

import sys
from typing import Annotated

import typer

from headrace.pipeline.cli.arguments import command_group, compositions

__all__ = ("app",)

app = command_group("The path of the data: stages, topics, records.", nested=True)


@app.command()
def show(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[@ FILE ... [KEY=VALUE ...]]", help="A configuration to show.")
    ] = None,
) -> None:
    """Print topics, stages and, for a configuration, its operators; refuses what could not work."""
    from headrace.pipeline.flow import describe, validate
    from headrace.schemas.config import load_config

    config = None
    if words:
        config = load_config(*compositions(words))
        validate(config)
    sys.stdout.write(describe(config) + "\n")
