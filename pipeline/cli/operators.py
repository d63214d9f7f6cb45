"""``headrace operators``: plug-ins that are installed, what they say of themselves, and how to write and try one.

Lists and shows every kind; ``check``, ``new`` and ``test`` are for operators, the other kinds have commands of their
own. Nothing needs a broker.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, compositions, print_table
from headrace.pipeline.cli.plugin_kinds import (
    print_checks,
    print_keys,
    print_plugins,
    refuse_taken,
    setting_of,
    tell_of,
)

__all__ = ("app",)

app = command_group("Installed plug-ins by group; write and try an operator.")


class OperatorKind(StrEnum):
    """What a new operator does: before rollout, with a closed group, or at serving."""

    settings = "settings"
    prompt = "prompt"
    shape = "shape"
    filter = "filter"
    downsample = "downsample"
    staleness = "staleness"
    replay = "replay"
    order = "order"
    batch = "batch"


@app.command("list")
def list_plugins(output: Output = Format.text) -> None:
    """Every plug-in by kind and name, with the object behind it and the distribution that brings it."""
    from headrace.connectors.plugins import GROUPS

    print_plugins([group.removeprefix("headrace.") for group in GROUPS], output)


@app.command()
def show(
    kind: Annotated[str, typer.Argument(help="operators, rewards, losses ... as `list` says; an operator's name.")],
    name: Annotated[str, typer.Argument(help="Name of the plug-in; may be left out for an operator.")] = "",
) -> None:
    """What a plug-in says of itself and its keys with their defaults; of an operator also its kind."""
    found = tell_of(kind, name) if name else tell_of("operators", kind)
    if hasattr(found, "Configuration"):
        sys.stdout.write(f"\nkind: {found.kind}\n")
        print_keys(found.Configuration)


@app.command()
def check(
    words: Annotated[list[str], typer.Argument(metavar="@ FILE ... [KEY=VALUE ...]", help="The configuration.")],
) -> None:
    """Check the operators of a configuration: names, keys, streams, policies and their order."""
    from headrace.pipeline.flow import validate
    from headrace.pipeline.operator_chain import operator_class
    from headrace.schemas.config import load_config

    config = load_config(*compositions(words))
    validate(config)
    rows = [
        (entry.type, operator_class(entry).kind, entry.stream or "all", entry.policy or "all")
        for entry in config.operators
    ]
    print_table(("operator", "kind", "stream", "policy"), rows)
    sys.stdout.write(f"{len(rows)} operators can work in this order\n")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the operator, such as my_filter.")],
    kind: Annotated[OperatorKind, typer.Option(help="What it does.")] = OperatorKind.filter,
    folder: Annotated[Path | None, typer.Option(help="Where to write; the name by default.")] = None,
) -> None:
    """Write a package with an operator, its entry point and its tests."""
    from headrace.pipeline.cli.plugin_package import write_package

    refuse_taken("operators", name)
    for path in write_package("operators", name, folder or Path(name), operator_kind=kind.value):
        sys.stdout.write(f"{path}\n")


@app.command()
def test(
    name: Annotated[str, typer.Argument(help="Name of an operator, or module:Class.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Its settings.")] = None,
    groups: Annotated[int, typer.Option(min=7, help="Groups to try it on; more than a window of it holds.")] = 42,
    output: Output = Format.text,
) -> None:
    """Try an operator on groups of all sorts: same decisions each time and after every restart, named drops."""
    from headrace.pipeline.operator_conformance import conformance

    print_checks(conformance(name, dict(map(setting_of, settings or ())), groups=groups), output)
