"""``headrace operators``: plug-ins that are installed, what they say of themselves, and how to write and try one.

Lists and shows every kind; ``check``, ``new`` and ``test`` are for operators. Nothing needs a broker.
"""

import sys
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, compositions, print_json, print_table

__all__ = ("app",)

app = command_group("Installed plug-ins by group; write and try an operator.")


class OperatorKind(StrEnum):
    """Where a new operator stands in the order."""

    shape = "shape"
    filter = "filter"
    downsample = "downsample"


@app.command("list")
def list_plugins(output: Output = Format.text) -> None:
    """Every plug-in by kind and name, with the object behind it and the distribution that brings it."""
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
    kind: Annotated[str, typer.Argument(help="operators, rewards, losses ... as `list` says; an operator's name.")],
    name: Annotated[str, typer.Argument(help="Name of the plug-in; may be left out for an operator.")] = "",
) -> None:
    """What a plug-in says of itself; of an operator also its kind and its keys with their defaults."""
    import inspect

    from headrace.connectors.plugins import load

    group, name = (f"headrace.{kind}", name) if name else ("headrace.operators", kind)
    found = load(group, name)
    sys.stdout.write(f"{found.__module__}:{getattr(found, '__qualname__', name)}\n\n")
    sys.stdout.write((inspect.getdoc(found) or "It has no documentation.") + "\n")
    if group == "headrace.operators":
        module = inspect.getdoc(sys.modules[found.__module__])
        sys.stdout.write(f"\n{module}\n" if module else "")
        sys.stdout.write(f"\nkind: {found.kind}\n")
        _print_keys(found.Configuration)


def _print_keys(configuration: Any) -> None:
    import inspect
    import json

    from pydantic_core import PydanticUndefined

    rows = []
    for name, field in configuration.model_fields.items():
        default = field.get_default(call_default_factory=True)
        kind = getattr(field.annotation, "__name__", "") if isinstance(field.annotation, type) else field.annotation
        shown = "required" if default is PydanticUndefined else json.dumps(default, default=str)
        rows.append((name, str(kind).replace("typing.", ""), shown))
    if not rows:
        sys.stdout.write("keys: none\n")
        return
    sys.stdout.write(f"{inspect.getdoc(configuration)}\n\n")
    print_table(("key", "type", "default"), rows)


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
    kind: Annotated[OperatorKind, typer.Option(help="What it does to a group.")] = OperatorKind.filter,
    folder: Annotated[Path | None, typer.Option(help="Where to write; the name by default.")] = None,
) -> None:
    """Write a package with an operator, its entry point and its tests."""
    from headrace.connectors.plugins import installed
    from headrace.pipeline.cli.operator_package import write_package
    from headrace.schemas.errors import ConfigurationError

    taken = installed("headrace.operators").get(name)
    if taken is not None:
        owner = taken.dist.name if taken.dist else "another package"
        raise ConfigurationError(f"{owner} has an operator {name!r} ({taken.value}): two of one name are refused")
    for path in write_package(name, kind.value, folder or Path(name)):
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

    checks = conformance(name, dict(map(_setting, settings or ())), groups=groups)
    rows = [(c.name, "ok" if c.passed else "BROKEN", c.detail) for c in checks]
    if output is Format.json:
        print_json([{"check": c.name, "passed": c.passed, "detail": c.detail} for c in checks])
    else:
        print_table(("check", "result", "detail"), rows)
    if not all(c.passed for c in checks):
        raise typer.Exit(1)


def _setting(word: str) -> tuple[str, Any]:
    from headrace.schemas.errors import ConfigurationError

    key, equals, value = word.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigurationError(f"{word!r} is not of the form key=value, such as window=8")
    try:
        return key, tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key, value
