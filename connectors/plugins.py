"""Plug-ins by entry point: ``load("headrace.operators", "dynamic_sampling")`` gives the object behind a name.

One function for all groups (operators, workflows, environments, rewards, losses, advantages, engines, datasets,
backends, sinks).
A name is also accepted as ``module:attribute``, so that a user's own code needs no package. Every failure says which
distribution and entry point it came from and what else there is.
"""

import difflib
import importlib
import sys
import traceback
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from headrace.schemas.errors import ConfigurationError

__all__ = ("GROUPS", "find", "installed", "load")

GROUPS = tuple(
    f"headrace.{kind}"
    for kind in (
        "operators",
        "workflows",
        "environments",
        "rewards",
        "losses",
        "advantages",
        "engines",
        "datasets",
        "backends",
        "sinks",
    )
)
"""The entry point groups."""


def installed(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group by name; the first distribution that declares a name has it. Nothing is imported."""
    found: dict[str, EntryPoint] = {}
    for entry in _entries(_checked(group), tuple(sys.path)):
        found.setdefault(entry.name, entry)
    return dict(sorted(found.items()))


def find(group: str, name: str) -> EntryPoint:
    """The entry point behind ``name`` in ``group``; nothing is imported.

    Raises ConfigurationError when there is none of that name, or two distributions claim it.
    """
    entries = [entry for entry in _entries(_checked(group), tuple(sys.path)) if entry.name == name]
    targets = {entry.value for entry in entries}
    if not entries:
        names = list(installed(group))
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(f"{group} has no {name!r}{hint}. Installed: {', '.join(names) or 'none'}")
    if len(targets) > 1:
        claims = " and ".join(sorted(f"{_distribution(entry)} ({entry.value})" for entry in entries))
        raise ConfigurationError(f"{group} {name!r} is declared by {claims}; uninstall one or name module:attribute")
    return entries[0]


def load(group: str, name: str) -> Any:
    """The object behind ``name`` in ``group``, or behind ``module:attribute``.

    Raises ConfigurationError when there is none of that name, two distributions claim it, or its import fails.
    """
    if ":" in name:
        return _resolve(f"{group} {name!r}", name)
    entry = find(group, name)
    return _resolve(
        f"{group} {name!r} (entry point {entry.value!r} of distribution {_distribution(entry)})", entry.value
    )


@cache
def _entries(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points of a group on a path: finding them reads the metadata of every installed distribution."""
    return tuple(entry_points(group=group))


def _checked(group: str) -> str:
    if group not in GROUPS:
        raise ConfigurationError(f"{group!r} is no group of plug-ins; groups are {', '.join(GROUPS)}")
    return group


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown"


def _resolve(what: str, value: str) -> Any:
    module, _, attribute = value.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # the seam around plug-ins, whose modules may raise anything
        told = f"{what} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigurationError(told + _frames(error)) from error
    return found


def _frames(error: Exception) -> str:
    """The lines of the plug-in's own modules that led to the error; none when there was no module to run."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f for f in frames if "importlib" not in f.filename]
    return ("\n" + "".join(traceback.format_list(own)).rstrip()) if own else ""
