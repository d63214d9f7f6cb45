"""``headrace operators``: plug-ins that are installed, by group, with where they come from."""

import sys
from typing import Annotated

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json, print_table

__all__ = ("app",)

app = command_group("Installed plug-ins by group.")


@app.command("list")
def list_plugins(output: Output = Format.text) -> None:
    """Operators, workflows, environments, rewards, losses, advantages, engines, datasets, backends and sinks by name."""
    from headrace.connectors.plugins import GROUPS, installed

    rows = [
        (group.removeprefix("headrace."), name, entry.value, entry.dist.name if entry.dist else "")
        for group in GROUPS
        for name, entry in installed(group).items()
    ]
    columns = ("kind", "name", "object", "distribution")
    if output is Format.json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, rows)


@app.command()
def show(
    kind: Annotated[str, typer.Argument(help="operators, rewards, losses ... as `list` says.")],
    name: Annotated[str, typer.Argument(help="Name of the plug-in.")],
) -> None:
    """What a plug-in says of itself."""
    import inspect

    from headrace.connectors.plugins import load

    found = load(f"headrace.{kind}", name)
    sys.stdout.write(f"{found.__module__}:{getattr(found, '__qualname__', name)}\n\n")
    sys.stdout.write((inspect.getdoc(found) or "It has no documentation.") + "\n")
