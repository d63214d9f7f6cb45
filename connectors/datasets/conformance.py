"""What every dataset format must keep, tried on a file: rows by number, the same each time, in any order.

In: a name or ``module:attribute`` and the setting ``path``. Out: one ``Check`` for every promise of ``rows.Rows``.
"""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from headrace.connectors.conformance import Check, attempt
from headrace.connectors.datasets.rows import BadRow, Rows
from headrace.connectors.plugins import load
from headrace.schemas.errors import ConfigurationError

__all__ = ("conformance",)

_MOST = 200
"""Rows that are tried; of more, as many at random."""


def conformance(name: str, settings: Mapping[str, Any]) -> list[Check]:
    """Try a format on the dataset at ``settings["path"]``. Raises ConfigurationError without one, or for other keys."""
    if set(settings) != {"path"}:
        raise ConfigurationError("a dataset format is tried on a dataset: give path=FILE and nothing else")
    path = Path(settings["path"])
    if not path.exists():
        raise ConfigurationError(f"dataset {path} does not exist")
    make = load("headrace.datasets", name)
    rows: Rows = make(path)
    numbers = list(range(len(rows)))
    if len(numbers) > _MOST:
        numbers = Random(0).sample(numbers, _MOST)
    return [
        attempt("rows", lambda: _rows(rows, numbers)),
        attempt("any_order", lambda: _any_order(rows, make(path), numbers)),
        attempt("places", lambda: _places(rows, numbers)),
        attempt("missing", lambda: _missing(make, path)),
    ]


def _read(rows: Rows, number: int) -> Mapping[str, Any] | str:
    """A row, or why it cannot be read."""
    try:
        return rows.read(number)
    except BadRow as error:
        return f"unreadable: {error}"


def _rows(rows: Rows, numbers: list[int]) -> str:
    assert numbers, "it has no row: give a path with some"
    bad = 0
    for number in numbers:
        row = _read(rows, number)
        if isinstance(row, str):
            bad += 1
            continue
        assert isinstance(row, Mapping), f"row {number} is a {type(row).__name__}, not columns by name"
        odd = [key for key in row if not isinstance(key, str)]
        assert not odd, f"row {number} has a column {odd[0]!r}, whose name is no text"
    return f"{len(numbers)} rows by column name, {bad} of them unreadable and said so"


def _any_order(rows: Rows, again: Rows, numbers: list[int]) -> str:
    assert len(rows) == len(again), f"opened again it has {len(again)} rows, not {len(rows)}"
    mixed = Random(1).sample(numbers, len(numbers))
    there = {number: _read(again, number) for number in mixed}
    for number in numbers:
        assert _read(rows, number) == there[number], f"row {number} is another when it is read in another order"
    return "the same rows in any order, and when it is opened again"


def _places(rows: Rows, numbers: list[int]) -> str:
    places = [rows.where(number) for number in numbers]
    assert all(isinstance(place, str) and place for place in places), "where does not say a place in words"
    assert len(set(places)) == len(places), "two rows have one place"
    return f"each row has a place of its own, such as {places[0]}"


def _missing(make: Any, path: Path) -> str:
    gone = path.with_name(path.name + ".missing")
    try:
        make(gone)
    except (ConfigurationError, OSError) as error:
        return f"a path that is not there is refused: {type(error).__name__}"
    raise AssertionError("it opens a path that does not exist")
