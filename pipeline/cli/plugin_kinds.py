"""``headrace rewards``, ``losses`` and so on: list, show, check, write and try plug-ins of one kind.

The eight kinds have the same five commands; ``operators`` has its own, because operators stand in an order. Nothing
needs a broker, and only the plug-in that is asked for is imported.
"""

import inspect
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, compositions, print_json, print_table
from headrace.pipeline.cli.plugin_package import singular

__all__ = ("plugin_commands", "print_checks", "print_keys", "print_plugins", "refuse_taken", "setting_of", "tell_of")

Settings = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Its settings.")]


def plugin_commands(kind: str, about: str) -> typer.Typer:
    """The commands of a kind: its entry point group without ``headrace.``, and a line of help."""
    app = command_group(about)
    one = singular(kind)
    a_one = f"{'an' if one[0] in 'aeiou' else 'a'} {one}"

    @app.command("list", help=f"Every installed {one} by name, with the object behind it and its distribution.")
    def list_plugins(output: Output = Format.text) -> None:
        print_plugins([kind], output)

    @app.command(help=f"What {a_one} says of itself, and its keys with their defaults.")
    def show(name: Annotated[str, typer.Argument(help=f"Name of {a_one}, or module:attribute.")]) -> None:
        tell_of(kind, name)

    @app.command(help=f"Check what a configuration says of its {kind}: names, keys, and that they can be imported.")
    def check(
        words: Annotated[list[str], typer.Argument(metavar="@ FILE ... [KEY=VALUE ...]", help="The configuration.")],
    ) -> None:
        from headrace.pipeline.plugin_uses import check_uses
        from headrace.schemas.config import load_config

        rows = [(use.where, use.name, found) for use, found in check_uses(load_config(*compositions(words)), kind)]
        print_table(("key", one, "object"), rows)
        sys.stdout.write(f"{len(rows)} {kind} can work\n")

    @app.command(help=f"Write a package with {a_one}, its entry point and its tests.")
    def new(
        name: Annotated[str, typer.Argument(help=f"Name of the {one}, such as my_{one}.")],
        folder: Annotated[Path | None, typer.Option(help="Where to write; the name by default.")] = None,
    ) -> None:
        from headrace.pipeline.cli.plugin_package import write_package

        refuse_taken(kind, name)
        for path in write_package(kind, name, folder or Path(name)):
            sys.stdout.write(f"{path}\n")

    @app.command(help=f"Try {a_one} on what its contract promises; exits with 1 for a broken promise.")
    def test(
        name: Annotated[str, typer.Argument(help=f"Name of {a_one}, or module:attribute.")],
        settings: Settings = None,
        output: Output = Format.text,
    ) -> None:
        from headrace.connectors.conformance import conformance

        print_checks(conformance(kind, name, dict(map(setting_of, settings or ()))), output)

    return app


def print_plugins(kinds: Sequence[str], output: Format) -> None:
    """Every installed plug-in of some kinds, with the object behind it and the distribution that brings it."""
    from headrace.connectors.plugins import installed

    rows = [
        (kind, name, entry.value, entry.dist.name if entry.dist else "")
        for kind in kinds
        for name, entry in installed(f"headrace.{kind}").items()
    ]
    columns = ("kind", "name", "object", "distribution")
    if output is Format.json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, rows)


def tell_of(kind: str, name: str) -> Any:
    """Print what a plug-in says of itself and, where it has a model of them, its keys; gives the plug-in.

    Raises ConfigurationError when it cannot be found or imported.
    """
    from headrace.connectors.plugins import load

    found = load(f"headrace.{kind}", name)
    sys.stdout.write(f"{found.__module__}:{getattr(found, '__qualname__', name)}\n\n")
    sys.stdout.write((inspect.getdoc(found) or "It has no documentation.") + "\n")
    module = inspect.getdoc(sys.modules[found.__module__])
    sys.stdout.write(f"\n{module}\n" if module else "")
    model = getattr(found, "Options", None)
    if model is not None:
        sys.stdout.write("\n")
        print_keys(model)
    return found


def print_keys(model: Any) -> None:
    """The keys of a pydantic model with their types and defaults, under what the model says of them."""
    from pydantic_core import PydanticUndefined

    rows = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        kind = getattr(field.annotation, "__name__", "") if isinstance(field.annotation, type) else field.annotation
        shown = "required" if default is PydanticUndefined else json.dumps(default, default=str)
        rows.append((name, str(kind).replace("typing.", ""), shown))
    if not rows:
        sys.stdout.write("keys: none\n")
        return
    sys.stdout.write(f"{inspect.getdoc(model)}\n\n")
    print_table(("key", "type", "default"), rows)


def refuse_taken(kind: str, name: str) -> None:
    """Raise ConfigurationError for a name that an installed plug-in of the kind has."""
    from headrace.connectors.plugins import installed
    from headrace.schemas.errors import ConfigurationError

    taken = installed(f"headrace.{kind}").get(name)
    if taken is not None:
        owner = taken.dist.name if taken.dist else "another package"
        told = f"{owner} has a plug-in {name!r} ({taken.value}) in {kind}"
        raise ConfigurationError(f"{told}: two of one name are refused")


def print_checks(checks: Sequence[Any], output: Format) -> None:
    """Print the checks of a conformance kit. Raises typer.Exit with 1 for a broken promise."""
    rows = [(c.name, "ok" if c.passed else "BROKEN", c.detail) for c in checks]
    if output is Format.json:
        print_json([{"check": c.name, "passed": c.passed, "detail": c.detail} for c in checks])
    else:
        print_table(("check", "result", "detail"), rows)
    if not all(c.passed for c in checks):
        raise typer.Exit(1)


def setting_of(word: str) -> tuple[str, Any]:
    """A setting ``key=value`` with its value as in TOML, else as text. Raises ConfigurationError for another form."""
    from headrace.schemas.errors import ConfigurationError

    key, equals, value = word.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigurationError(f"{word!r} is not of the form key=value, such as window=8")
    try:
        return key, tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key, value
