"""Storage on disk and in memory behave alike; an append that fails on disk leaves the file as it was."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.connectors.broker.storage import DiskStorage, MemoryStorage, Storage, StorageError


@pytest.fixture(params=["disk", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Both kinds."""
    return DiskStorage(tmp_path / "data") if request.param == "disk" else MemoryStorage()


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_what_is_appended_is_read_and_outlives_the_handle(storage: Storage, kind: type) -> None:
    file = storage.open("a/b/c.log")
    file.append(kind(b"0123"))
    file.append(kind(b"456789"))
    assert file.size == 10
    assert (file.read(0, 100), file.read(3, 4), file.read(9, 5), file.read(10, 5)) == (
        b"0123456789",
        b"3456",
        b"9",
        b"",
    )
    again = storage.open("a/b/c.log")
    assert (again.size, again.read(0, 10)) == (10, b"0123456789")


def test_a_cut_file_goes_on_where_it_was_cut(storage: Storage) -> None:
    file = storage.open("f")
    file.append(b"0123456789")
    file.truncate(4)
    assert (file.size, file.read(0, 100)) == (4, b"0123")
    file.append(b"x")
    assert storage.open("f").read(0, 100) == b"0123x"


def test_names_are_what_lies_directly_in_a_folder_sorted(storage: Storage) -> None:
    for name in ("topics/b/0/2.log", "topics/b/0/1.log", "topics/a/0/1.log", "top.jsonl", "topics2/x"):
        storage.open(name)
    assert storage.names("topics") == ["a", "b"]
    assert storage.names("topics/b/0") == ["1.log", "2.log"]
    assert storage.names("none") == storage.names("topics/none") == []
    assert {"top.jsonl", "topics", "topics2"} <= set(storage.names(""))


def test_a_rename_replaces_in_one_step_and_the_handle_goes_along(storage: Storage) -> None:
    storage.open("new").append(b"old content")
    file = storage.open("temporary")
    file.append(b"ab")
    storage.rename("temporary", "new")
    file.append(b"c")
    assert storage.open("new").read(0, 100) == b"abc"
    assert "temporary" not in storage.names("")


def test_removing_is_idempotent_and_a_reader_of_a_removed_file_can_finish(storage: Storage) -> None:
    file = storage.open("folder/f")
    file.append(b"content")
    storage.remove("folder/f")
    storage.remove("folder/f")
    assert file.read(0, 100) == b"content"
    assert storage.names("folder") == []
    fresh = storage.open("folder/f")
    assert fresh.size == 0, "a new file of the old name is empty"


def test_a_folder_goes_with_all_below_it_and_its_neighbours_stay(storage: Storage) -> None:
    for name in ("topics/a/0/f", "topics/a/1/f", "topics/ab/0/f"):
        storage.open(name)
    storage.remove_folder("topics/a")
    storage.remove_folder("topics/a")
    assert storage.names("topics") == ["ab"]


def test_an_append_that_fails_half_way_keeps_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    file = DiskStorage(tmp_path).open("f")
    file.append(b"before")
    with _largest_file(1 << 16), pytest.raises(StorageError, match=r"File too large after \d+ of 100000 bytes"):
        file.append(bytes(100_000))
    assert (file.size, (tmp_path / "f").read_bytes()) == (6, b"before")
    file.append(bytes(100_000))
    assert (tmp_path / "f").stat().st_size == 100_006


def test_a_full_memory_refuses_and_keeps_nothing() -> None:
    storage = MemoryStorage()
    storage.open("f")
    storage.files["f"].limit = 5
    file = storage.open("f")
    file.append(b"abc")
    with pytest.raises(StorageError, match="limit of 5 bytes"):
        file.append(b"def")
    assert (file.size, file.read(0, 10)) == (3, b"abc")
    file.append(b"de")


def test_a_place_where_no_file_can_be_is_a_storage_error(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    storage.open("file")
    with pytest.raises(StorageError, match="file/below"):
        storage.open("file/below")
    with pytest.raises(StorageError):
        storage.open("x" * 300)


def test_descriptors_are_closed_with_their_last_holder_and_not_inherited(tmp_path: Path) -> None:
    file = DiskStorage(tmp_path).open("f")
    number = file.fileno()
    assert not os.get_inheritable(number)
    os.fstat(number)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert MemoryStorage().open("f").fileno() == -1
