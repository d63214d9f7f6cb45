"""Every fault that the documentation names has a test that makes it happen."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
COMPONENTS = ("Rollout workers", "Operator workers", "Source", "Trainer", "Broker", "Object store", "Launcher", "Data")


def rows() -> list[list[str]]:
    """Cells of all table rows below the heads."""
    lines = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| what |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_points_at_one_test_that_exists() -> None:
    assert len(rows()) > 60
    for cells in rows():
        found = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", cells[-1])
        assert found, f"no test in: {cells}"
        source = (ROOT / found[1]).read_text(encoding="utf-8")
        assert re.search(rf"^def {found[2]}\(", source, re.M), f"{found[1]} has no {found[2]}"


def test_every_component_has_its_table_and_no_fault_stands_twice() -> None:
    for name in COMPONENTS:
        part = re.search(rf"^## {name}\n(.*?)^## ", TEXT, re.M | re.S)
        assert part, name
        assert part[1].count("\n| ") > 4, f"{name} has hardly a row"
    sections = re.split(r"^## ", TEXT, flags=re.M)
    for section in sections:
        named = Counter(line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| "))
        assert [name for name, count in named.items() if count > 1] == []


def test_every_row_says_what_then_happens() -> None:
    for cells in rows():
        assert len(cells) in (3, 4), cells
        assert cells[0], cells
        assert len(cells[1]) > 5, cells
