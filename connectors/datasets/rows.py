"""Rows of a dataset by number, whatever file they lie in; the readers of JSONL, Parquet and Hugging Face folders.

Goes in: a path; comes out: rows as dictionaries and, for messages, where each one stands. A reader is a plug-in of the
group ``headrace.datasets``: a callable that takes a path and gives a ``Rows``.
"""

import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from headrace.connectors.plugins import load
from headrace.schemas.errors import ConfigurationError

__all__ = ("BadRow", "JsonLines", "Rows", "TableRows", "huggingface", "open_rows", "parquet")


class BadRow(Exception):
    """A row that cannot be read; ``raw`` is what stands there."""

    def __init__(self, reason: str, raw: bytes) -> None:
        super().__init__(reason)
        self.raw = raw


class Rows(Protocol):
    """Rows by number."""

    def __len__(self) -> int:
        """Count of rows, unreadable ones included."""
        ...

    def read(self, number: int) -> Mapping[str, Any]:
        """Row ``number`` (from 0) by column name. Raises BadRow."""
        ...

    def where(self, number: int) -> str:
        """Where a row stands, for messages: file and line or row."""
        ...


class JsonLines:
    """A file with one JSON object a line; empty lines are skipped. Only line positions are kept in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("q")
        self._lines = array("q")
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigurationError(f"cannot read dataset {path}: {error.strerror}") from error
        start = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                self._starts.append(start)
                self._lines.append(number)
            start += len(line)

    def __len__(self) -> int:
        """Lines that hold something."""
        return len(self._starts)

    def read(self, number: int) -> Mapping[str, Any]:
        """The object of a line."""
        self._file.seek(self._starts[number])
        raw = self._file.readline().rstrip(b"\r\n")
        try:
            row = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BadRow(f"not UTF-8: {error.reason} at byte {error.start}", raw) from None
        except (ValueError, RecursionError) as error:
            raise BadRow(f"not JSON: {error}", raw) from None
        if not isinstance(row, dict):
            raise BadRow(f"a JSON {type(row).__name__} instead of an object with columns", raw)
        return row

    def where(self, number: int) -> str:
        """``FILE line N``, counted from 1."""
        return f"{self._path} line {self._lines[number]}"


class TableRows:
    """Rows of anything with a length that gives a dictionary by number; ``name`` is for messages."""

    def __init__(self, name: str, table: Any) -> None:
        self._name = name
        self._table = table

    def __len__(self) -> int:
        """Rows of the table."""
        return len(self._table)

    def read(self, number: int) -> Mapping[str, Any]:
        """A row; values are plain Python."""
        row: Mapping[str, Any] = self._table[number]
        return row

    def where(self, number: int) -> str:
        """``FOLDER row N``, counted from 0."""
        return f"{self._name} row {number}"


class _ArrowTable:
    """A pyarrow table by row number."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self._table.slice(number, 1).to_pylist()[0]
        return row


def parquet(path: Path) -> Rows:
    """A Parquet file, or a folder of them in the order of their names; mapped into memory. Needs pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet as reader
    except ImportError as error:
        raise ConfigurationError("Parquet datasets need pyarrow: pip install 'headrace[datasets]'") from error
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    try:
        tables = [reader.read_table(file, memory_map=True) for file in files]
        return TableRows(str(path), _ArrowTable(pyarrow.concat_tables(tables)))
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise ConfigurationError(f"cannot read dataset {path} as Parquet: {error}") from error


def huggingface(path: Path) -> Rows:
    """A folder written by ``Dataset.save_to_disk``; of a DatasetDict name the split's folder. Needs datasets."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError("Hugging Face datasets need datasets: pip install 'headrace[datasets]'") from error
    try:
        table = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read dataset {path} as a Hugging Face dataset on disk: {error}") from error
    if isinstance(table, datasets.DatasetDict):
        splits = ", ".join(str(path / name) for name in table)
        raise ConfigurationError(f"{path} holds several splits; name one of {splits}")
    return TableRows(str(path), table)


def open_rows(path: Path | str, kind: str = "auto") -> Rows:
    """Open a dataset; ``auto`` goes by the name and what a folder holds. Raises ConfigurationError."""
    path = Path(path)
    if not path.exists():
        raise ConfigurationError(f"dataset {path} does not exist; check streams.S.dataset and eval.dataset")
    rows: Rows = load("headrace.datasets", _kind_of(path) if kind == "auto" else kind)(path)
    return rows


def _kind_of(path: Path) -> str:
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return "huggingface"
        if any(path.glob("*.parquet")):
            return "parquet"
    elif path.suffix == ".parquet":
        return "parquet"
    elif path.suffix in (".jsonl", ".ndjson", ".json"):
        return "jsonl"
    raise ConfigurationError(
        f"dataset {path}: what it holds cannot be told from its name; set streams.S.format to jsonl, parquet or "
        "huggingface"
    )
