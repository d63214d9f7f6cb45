"""Tables of checkpoints: every byte counts, and what is no checkpoint is said to be none."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.connectors.checkpoints import (
    TABLE,
    BrokenCheckpoint,
    CheckpointFile,
    CheckpointTable,
    checkpoint_prefix,
    digest_of,
    in_folder,
    in_store,
)
from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.store import ObjectInfo

TABLE_OF_TEN = CheckpointTable(
    lineage=0, batch=10, version=11, manifests=5, lanes={0: 40, 1: 2}, written_ms=1,
    files={"weights.bin": CheckpointFile(7, digest_of([b"wei", b"ghts"]))},
)  # fmt: skip


def put(root: Path, table: CheckpointTable = TABLE_OF_TEN) -> Path:
    (folder := root / table.name).mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"weights")
    (folder / TABLE).write_bytes(table.to_bytes())
    return folder


def test_folders_are_read_in_the_order_of_resuming(tmp_path: Path) -> None:
    for lineage, batch in ((1, 5), (0, 20), (0, 100)):
        put(tmp_path, replace(TABLE_OF_TEN, lineage=lineage, batch=batch))
    (tmp_path / ".0000-000000300.part").mkdir()
    (tmp_path / "note.txt").write_text("no folder")
    found = [table for _, table in in_folder(tmp_path)]
    assert [(t.lineage, t.batch) for t in found if isinstance(t, CheckpointTable)] == [(0, 20), (0, 100), (1, 5)]
    assert len(found) == 3
    assert list(in_folder(tmp_path / "none")) == []


def test_a_table_cut_at_any_byte_is_broken(tmp_path: Path) -> None:
    table = put(tmp_path) / TABLE
    whole = table.read_bytes()
    for length in range(len(whole) - 1):
        table.write_bytes(whole[:length])
        ((_, found),) = in_folder(tmp_path)
        assert isinstance(found, BrokenCheckpoint) and TABLE in str(found), length
    table.write_bytes(whole[:-1])  # without the newline behind it
    assert [found for _, found in in_folder(tmp_path)] == [TABLE_OF_TEN]


@pytest.mark.parametrize("length", range(9))
def test_a_file_of_another_size_is_found_without_reading_it(tmp_path: Path, length: int) -> None:
    file = put(tmp_path) / "weights.bin"
    file.write_bytes(b"weightss"[:length])
    ((_, found),) = in_folder(tmp_path)
    if length == 7:
        assert found == TABLE_OF_TEN
    else:
        assert isinstance(found, BrokenCheckpoint) and f"{length} bytes, 7 were written" in str(found)


@pytest.mark.parametrize("missing", ["weights.bin", TABLE])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    (put(tmp_path) / missing).unlink()
    ((_, found),) = in_folder(tmp_path)
    assert isinstance(found, BrokenCheckpoint) and missing in str(found)


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("headrace-checkpoint/2", "headrace-checkpoint/3"),
        lambda text: text.replace('"batch"', '"bach"'),
        lambda text: text.replace('"0": 40', '"zero": 40'),
        lambda text: text.replace('"size": 7', '"size": "many"'),
        lambda text: text.replace('"files": {', '"files": [{').replace("}\n }\n}", "}\n }]\n}"),
        lambda _: "[]",
        lambda _: "null",
        lambda _: "[" * 100_000,
    ],
)
def test_a_table_that_says_something_else_is_none(edit: Callable[[str], str]) -> None:
    text = TABLE_OF_TEN.to_bytes().decode()
    assert edit(text) != text
    with pytest.raises(BrokenCheckpoint, match="somewhere"):
        CheckpointTable.parse(edit(text).encode(), "somewhere")


def test_a_store_is_read_as_a_folder_is(tmp_path: Path) -> None:
    store, prefix = LocalStore(tmp_path), checkpoint_prefix("run", "main")
    store.put(f"{prefix}/0000-000000010/aa/{TABLE}", TABLE_OF_TEN.to_bytes())
    store.put(f"{prefix}/0000-000000010/aa/weights.bin/000000", b"weights")
    store.put(f"{prefix}/0000-000000020/bb/{TABLE}", b"{")
    store.put(f"{checkpoint_prefix('run', 'main2')}/0000-000000010/cc/{TABLE}", TABLE_OF_TEN.to_bytes())
    (where, found), (_, broken) = in_store(store, prefix)
    assert (where, found) == (f"{prefix}/0000-000000010/aa", TABLE_OF_TEN)
    assert isinstance(broken, BrokenCheckpoint) and "0000-000000020" in str(broken)


class Pruned(LocalStore):
    """A store in which another process deletes what it has just listed."""

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See ``ObjectStore``."""
        for info in list(super().list(prefix, start_after)):
            if "0000-000000010" in info.key:
                self.delete(info.key)
            yield info


def test_what_goes_after_the_listing_is_not_among_them(tmp_path: Path) -> None:
    store, prefix = Pruned(tmp_path), checkpoint_prefix("run", "main")
    for name in ("0000-000000010/aa", "0000-000000020/bb"):
        store.put(f"{prefix}/{name}/{TABLE}", TABLE_OF_TEN.to_bytes())
    assert [where for where, _ in in_store(store, prefix)] == [f"{prefix}/0000-000000020/bb"]
