"""How arguments are written: ``@ file.toml`` and ``key=value``, output formats, and one way to make a command group.

Light on purpose: everything here is imported by every subcommand.
"""

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.schemas.errors import ConfigurationError

__all__ = (
    "Bootstrap",
    "Folder",
    "Format",
    "Output",
    "command_group",
    "compositions",
    "print_json",
    "print_table",
    "tidy",
)


class Format(StrEnum):
    """How a command that reads prints: for people, or one JSON value for programs."""

    text = "text"
    json = "json"


Folder = Annotated[Path, typer.Argument(help="The run's folder, such as runs/ID.")]
Output = Annotated[Format, typer.Option("--format", help="text for people, or one JSON value for programs.")]
Bootstrap = Annotated[str, typer.Option(help="HOST:PORT of the run's Kafka, where it is not the configured one.")]


def command_group(help_text: str, *, nested: bool = False) -> typer.Typer:
    """A Typer application with the settings that all subcommands share.

    ``nested`` keeps the name of a subcommand even where there is only one, as in ``headrace groups lag``.
    """
    app = typer.Typer(
        help=help_text,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
    )
    if nested:
        app.callback()(_nothing)
    return app


def _nothing() -> None:
    """What a group does before its subcommand."""


def compositions(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``@ base.toml @overlay.toml key=value`` into files and overrides.

    Files compose from left to right. Raises ConfigurationError for a word that is neither.

    >>> compositions(["@", "a.toml", "b.toml", "@c.toml", "trainer.lr=1e-4"])
    (['a.toml', 'b.toml', 'c.toml'], ['trainer.lr=1e-4'])
    """
    files: list[str] = []
    overrides: list[str] = []
    expected = False
    for word in words:
        if word == "@":
            expected = True
        elif word.startswith("@"):
            files.append(word[1:])
        elif expected or (files and word.endswith(".toml") and "=" not in word):
            files.append(word)
            expected = False
        elif "=" in word:
            overrides.append(word)
        else:
            raise ConfigurationError(f"{word!r} is neither '@ FILE' nor key=value; write: headrace run @ {word}")
    if expected or not files:
        raise ConfigurationError("name a configuration: headrace run @ recipes/sort_digits/run.toml [key=value ...]")
    return files, overrides


def print_json(value: Any) -> None:
    """One JSON value on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns of text, as wide as their widest cell; numbers stand at the right, a cell's lines on one."""
    cells = [[" ".join(str(cell).splitlines()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    for line in (list(header), *cells):
        shown = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)]
        sys.stdout.write("  ".join(shown).rstrip() + "\n")


def tidy(message: str) -> str:
    """A message of several lines, later ones indented."""
    return message.replace("\n", "\n  ")
