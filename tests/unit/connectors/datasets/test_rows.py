"""Readers of rows: lines as they lie in a file, whatever stands in them, and datasets of every kind by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.connectors.datasets.prompts import PromptDataset
from headrace.connectors.datasets.rows import BadRow, JsonLines, TableRows, open_rows
from headrace.schemas.codec import encode
from headrace.schemas.config import StreamConfig
from headrace.schemas.errors import ConfigurationError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _lines(tmp_path: Path, data: bytes) -> JsonLines:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    return JsonLines(path)


def test_empty_lines_are_no_rows_and_every_row_knows_its_line(tmp_path: Path) -> None:
    rows = _lines(tmp_path, b'\n{"a": 1}\r\n\r\n   \n{"a": 2}\n\n{"a": 3}')
    assert len(rows) == 3
    assert [rows.read(n) for n in (2, 0, 1)] == [{"a": 3}, {"a": 1}, {"a": 2}]
    assert [rows.where(n).rpartition(" ")[2] for n in range(3)] == ["2", "5", "7"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=4), max_size=6), ascii_only=st.booleans())
def test_what_json_wrote_is_read_back(
    content: list[dict[str, Any]], ascii_only: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in content)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    rows = JsonLines(path)
    assert len(rows) == len(content)
    for number, row in enumerate(content):
        try:
            assert rows.read(number) == row
        except BadRow as error:
            assert "not UTF-8" in str(error), "only a lone surrogate written as it is"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "not JSON"),
        (b'{"a": 1} {"b": 2}', "not JSON"),
        (b"\xff\xfe{}", "not UTF-8: invalid start byte at byte 0"),
        (b'{"a": "\xc3("}', "not UTF-8: invalid continuation byte at byte 7"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[1]", "a JSON list instead of an object"),
        (b"null", "a JSON NoneType instead of an object"),
        (b'"text"', "a JSON str instead of an object"),
        (b"1" * 5_000, "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' * 50_000, "not JSON"),
    ],
    ids=["open", "two", "utf-16", "utf-8", "mark", "list", "null", "text", "digits", "deep list", "deep object"],
)
def test_a_line_that_is_no_row_is_bad_with_its_bytes_and_its_neighbours_are_read(
    tmp_path: Path, line: bytes, says: str
) -> None:
    rows = _lines(tmp_path, b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    with pytest.raises(BadRow, match=says) as caught:
        rows.read(1)
    assert caught.value.raw == line
    assert (rows.read(0), rows.read(2)) == ({"a": 1}, {"a": 3})


@pytest.mark.parametrize(
    ("name", "content"), [("rows.json", b"{}\n"), ("rows.jsonl", b"{}\n"), ("rows.ndjson", b"{}\n")]
)
def test_the_kind_is_told_by_the_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert isinstance(open_rows(tmp_path / name), JsonLines)
    assert isinstance(open_rows(str(tmp_path / name), "jsonl"), JsonLines)


def test_a_kind_that_is_given_counts_more_than_the_name(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes(b'{"a": 1}\n')
    assert open_rows(tmp_path / "rows.txt", "jsonl").read(0) == {"a": 1}
    with pytest.raises(ConfigurationError, match="as Parquet"):
        open_rows(tmp_path / "rows.txt", "parquet")
    with pytest.raises(ConfigurationError, match="has no 'csv'"):
        open_rows(tmp_path / "rows.txt", "csv")


def test_what_cannot_be_told_or_read_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match=r"set streams\.S\.format to jsonl, parquet or huggingface"):
        open_rows(tmp_path / "folder")
    with pytest.raises(ConfigurationError, match="cannot read dataset"):
        open_rows(tmp_path / "folder", "jsonl")
    with pytest.raises(ConfigurationError, match="as a Hugging Face dataset on disk"):
        pytest.importorskip("datasets")
        open_rows(tmp_path / "folder", "huggingface")
    with pytest.raises(ConfigurationError, match="does not exist"):
        open_rows(tmp_path / "nothing.jsonl")


def test_a_folder_of_parquet_files_is_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for name, first in (("b", 3), ("a", 0)):
        table = pyarrow.Table.from_pylist([{"n": first + i, "text": ["x"] * i} for i in range(3)])
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    rows = open_rows(tmp_path)
    assert [rows.read(n)["n"] for n in range(len(rows))] == list(range(6))
    assert rows.read(5) == {"n": 5, "text": ["x", "x"]}
    assert rows.where(5) == f"{tmp_path} row 5"
    parquet.write_table(pyarrow.Table.from_pylist([{"other": 1}]), tmp_path / "c.parquet")
    with pytest.raises(ConfigurationError, match="as Parquet"):
        open_rows(tmp_path)


def test_a_table_of_ones_own_is_read_by_number() -> None:
    rows = TableRows("mine", [{"a": 1}, {"a": 2}])
    assert (len(rows), rows.read(1), rows.where(0)) == (2, {"a": 2}, "mine row 0")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), min_size=1, max_size=4))
def test_every_row_that_passes_the_check_can_travel(
    rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nothing may fail when a prompt is written hours later: what is bad is named at load."""
    path = tmp_path_factory.getbasetemp() / "travel.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p", "answer": "a", **row}) + "\n" for row in rows))
    config = StreamConfig.model_validate({"dataset": str(path), "on_bad_row": "dead-letter"})
    try:
        dataset = PromptDataset("main", config, rewards=["exact_match"])
    except ConfigurationError as error:
        assert "no row that can be used" in str(error)
        return
    assert len(dataset) + len(dataset.bad) == len(rows)
    for position in range(2 * len(dataset)):
        encode(dataset.prompt(position))


@pytest.mark.parametrize("row", ['{"\\ud800": 1}', '{"x\\udfff": "text"}', '{"column": "a\\ud800"}'])
def test_a_lone_surrogate_in_any_column_or_its_name_is_named_at_load(tmp_path: Path, row: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "answer": "a"}\n' + '{"prompt": "p", "answer": "a", ' + row[1:] + "\n")
    config = StreamConfig.model_validate({"dataset": str(path)})
    with pytest.raises(ConfigurationError, match=r"line 2: column .*lone surrogate"):
        PromptDataset("main", config, rewards=["exact_match"])
