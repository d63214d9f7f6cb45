"""Every benchmark is listed with its command and last figures, and takes the options that all of them take."""

from __future__ import annotations

import re
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def names() -> list[str]:
    """Modules that can be run: those with a main guard."""
    return [
        path.stem
        for path in sorted(BENCHMARKS.glob("*.py"))
        if re.search(r'^if __name__ == "__main__":', path.read_text(encoding="utf-8"), re.M)
    ]


def test_the_readme_lists_exactly_the_benchmarks_that_exist() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"benchmarks\.([a-z]\w*)", text)) == set(names())


def test_each_takes_quick_and_json() -> None:
    for name in names():
        text = (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")
        shared = "".join(path.read_text(encoding="utf-8") for path in BENCHMARKS.glob("_*.py"))
        for option in ("--quick", "--json"):
            assert option in text or option in shared, f"benchmarks.{name} has no {option}"


def test_figures_say_where_and_when_they_were_measured() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    if names():
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", text), "no date"
        assert re.search(r"\b\d+ cores?\b", text), "no machine"
