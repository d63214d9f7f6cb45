"""The form all benchmarks share: options --quick and --json FILE, a table, one flat JSON object of figures.

A benchmark gives `main` a function that measures; figures keep their names, so that two runs can be compared. The exit
status is 0 when it could measure, whatever the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One measured value. `target` is the bar it is held to, `at_least` its direction, `anchor` what it compares to."""

    name: str
    value: float
    unit: str = ""
    target: float | None = None
    at_least: bool = True
    anchor: str = ""

    @property
    def verdict(self) -> str:
        """Whether the bar is met; empty without one."""
        if self.target is None:
            return ""
        met = self.value >= self.target if self.at_least else self.value <= self.target
        return "met" if met else "MISSED"


Measure = Callable[[argparse.Namespace], Iterable[Figure]]


def median(values: Iterable[float]) -> float:
    """The middle one of several measurements."""
    return float(statistics.median(values))


def rounded(value: float) -> float:
    """Three significant digits, as far as a benchmark can tell."""
    return float(f"{value:.3g}")


def table(figures: Iterable[Figure]) -> str:
    """The figures as aligned text: measured, target, anchor."""
    rows = [("figure", "measured", "target", "", "anchor")]
    for figure in figures:
        sign = ">=" if figure.at_least else "<="
        target = f"{sign} {figure.target:g}" if figure.target is not None else ""
        measured = f"{rounded(figure.value):g} {figure.unit}".strip()
        rows.append((figure.name, measured, target, figure.verdict, figure.anchor))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(
    description: str | None, measure: Measure, options: Callable[[argparse.ArgumentParser], None] | None = None
) -> None:
    """Parse the options, measure, print the table and write the JSON; `options` adds a benchmark's own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements, under a minute")
    parser.add_argument("--json", type=Path, help="also write the figures as one flat JSON object to this file")
    if options is not None:
        options(parser)
    given = parser.parse_args()
    figures = list(measure(given))
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(table(figures))
    if given.json is not None:
        given.json.write_text(json.dumps({figure.name: rounded(figure.value) for figure in figures}, indent=1) + "\n")
