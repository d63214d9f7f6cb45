"""What only the store in a file has: the file itself, its faults, and scans of more than memory should hold."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from headrace.pipeline.runtime.sqlite_store import SqliteStore, StoreFile, _after
from headrace.pipeline.runtime.store import StoreView


def test_the_file_is_this_tasks_own_and_goes_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    one, other = SqliteStore(folder, "state-0"), SqliteStore(folder, "state-0")
    one.put(b"k", b"1")
    one.commit()
    assert other.get(b"k") is None
    assert len(list(folder.iterdir())) == 2
    one.close()
    other.close()
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreFile, match=r"state-0.*cannot be made.*runtime\.folder"):
        SqliteStore(tmp_path / "file" / "folder", "state-0")


def test_a_full_disk_is_an_error_that_says_that_nothing_is_lost(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, "state-0")
    store._base.execute("PRAGMA max_page_count = 10")
    store.put(b"k", bytes(1 << 20))
    with pytest.raises(StoreFile, match=r"cannot be written: database or disk is full.*restored from its changelog"):
        store.commit()
    store.close()


def test_a_scan_goes_page_by_page_and_merges_what_is_not_committed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, "state-0")
    view = StoreView(store, b"s")
    wanted = {n.to_bytes(2, "big"): b"v%d" % n for n in range(1000)}
    for key, value in wanted.items():
        view.put(key, value)
    store.commit()
    for n in range(0, 1000, 100):
        view.delete(n.to_bytes(2, "big"))
        del wanted[n.to_bytes(2, "big")]
    view.put(b"\xff\xff", b"last")
    view.put((5).to_bytes(2, "big"), b"new")
    wanted |= {b"\xff\xff": b"last", (5).to_bytes(2, "big"): b"new"}
    assert list(view.scan()) == sorted(wanted.items())
    assert list(view.scan(b"\x01")) == sorted((k, v) for k, v in wanted.items() if k.startswith(b"\x01"))
    assert store.nbytes() == sum(3 + len(b"v%d" % n) for n in range(1000))
    store.close()


def test_a_scan_that_a_commit_overtakes_ends_loudly(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, "state-0")
    store.restore([(b"%d" % n, b"") for n in range(600)])
    entries = store.scan(b"")
    next(entries)
    store.restore([(b"9", None)])
    with pytest.raises(RuntimeError, match="changed during a scan"):
        list(entries)
    store.close()


def test_a_file_that_somebody_else_broke_is_named(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, "state-0")
    store._base.execute("DROP TABLE entry")
    with pytest.raises(StoreFile, match=r"state-0.*cannot be read"):
        store.get(b"k")
    store.close()
    with pytest.raises(StoreFile, match="cannot be read"):
        store.get(b"k")


@pytest.mark.parametrize(("prefix", "end"), [(b"", None), (b"a", b"b"), (b"a\xff", b"b"), (b"\xff\xff", None)])
def test_the_bound_of_a_prefix(prefix: bytes, end: bytes | None) -> None:
    assert _after(prefix) == end


def test_the_version_of_sqlite_knows_what_is_used() -> None:
    assert sqlite3.sqlite_version_info >= (3, 8, 2), "WITHOUT ROWID"
