"""The shipped formats keep every promise on a file, and one that breaks a promise is found by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.connectors.conformance import assert_conforms
from headrace.connectors.datasets.conformance import conformance
from headrace.connectors.datasets.rows import JsonLines
from headrace.schemas.errors import ConfigurationError


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """300 rows, one of them torn, one not UTF-8."""
    lines = [json.dumps({"prompt": f"{n}+{n} 東京", "answer": n}).encode() for n in range(300)]
    lines[7], lines[8] = b'{"prompt": ', b'{"prompt": "\xff"}'
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_jsonl_and_parquet_conform(rows: Path, tmp_path: Path) -> None:
    assert_conforms("datasets", "jsonl", {"path": str(rows)})
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    file = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"prompt": ["a", "b", "c"], "answer": [1, 2, 3]}), file)
    assert_conforms("datasets", "parquet", {"path": str(file)})


def test_it_needs_a_path_with_something(rows: Path, tmp_path: Path) -> None:
    for settings, says in (
        ({}, "give path=FILE"),
        ({"path": str(rows), "x": 1}, "nothing else"),
        ({"path": "no"}, "no"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            conformance("jsonl", settings)
    (tmp_path / "empty.jsonl").write_text("")
    assert not conformance("jsonl", {"path": str(tmp_path / "empty.jsonl")})[0].passed


class Streaming(JsonLines):
    """Reads on, whatever row is asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.at = 0

    def read(self, number: int) -> Mapping[str, Any]:
        self.at = (self.at + 1) % len(self)
        return super().read(self.at)


class Nowhere(JsonLines):
    def where(self, number: int) -> str:
        return "somewhere"


class Numbered(JsonLines):
    def read(self, number: int) -> Any:
        return {number: super().read(number)}


def forgiving(path: Path) -> JsonLines:
    return JsonLines(path if path.exists() else path.with_name(path.name.removesuffix(".missing")))


@pytest.mark.parametrize(
    ("name", "broken", "says"),
    [
        ("Streaming", {"any_order"}, "is another when it is read in another order"),
        ("Nowhere", {"places"}, "two rows have one place"),
        ("Numbered", {"rows"}, "whose name is no text"),
        ("forgiving", {"missing"}, "opens a path that does not exist"),
    ],
)
def test_a_broken_promise_is_found(name: str, broken: set[str], says: str, rows: Path) -> None:
    checks = conformance(f"{__name__}:{name}", {"path": str(rows)})
    found = {check.name: check.detail for check in checks if not check.passed}
    assert set(found) == broken, found
    assert any(says in detail for detail in found.values()), found
