"""The local directory as an object store: colliding keys, listings against a dictionary, races."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.store import (
    AlreadyExists,
    NoSuchKey,
    StoreRefused,
    StoreUnavailable,
    UnsafeKey,
    check_key,
    check_prefix,
    exists,
)

PARTS = st.text("ab0._-=~@+", min_size=1, max_size=3).filter(lambda part: not part.startswith("."))


@pytest.mark.parametrize("create_only", [False, True])
@pytest.mark.parametrize("key", ["a/b", "a/b/c"])
def test_a_key_below_an_object_is_unsafe_and_no_lost_race(tmp_path: Path, key: str, create_only: bool) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"object")
    with pytest.raises(UnsafeKey, match="choose another key"):
        store.put(key, b"", create_only=create_only)
    assert store.get("a") == b"object"
    assert [info.key for info in store.list("")] == ["a"]


@pytest.mark.parametrize("create_only", [False, True])
def test_a_key_that_is_a_folder_of_other_objects_is_unsafe(tmp_path: Path, create_only: bool) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"object")
    with pytest.raises(UnsafeKey, match="choose another key"):
        store.put("a", b"", create_only=create_only)
    with pytest.raises(NoSuchKey):
        store.get("a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "no temporary file stays"


def test_looking_below_an_object_finds_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"object")
    for call in (store.get, store.head):
        with pytest.raises(NoSuchKey):
            call("a/b")
    assert not exists(store, "a/b")
    store.delete("a/b")
    assert list(store.list("a/")) == []
    assert store.get("a") == b"object"


def test_a_folder_is_no_object_to_be_deleted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"object")
    store.delete("a")
    assert store.get("a/b") == b"object"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.lists(st.lists(PARTS, min_size=1, max_size=3).map("/".join), max_size=10),
    prefix=st.lists(PARTS, max_size=2).map("/".join),
    start=st.lists(PARTS, max_size=2).map("/".join),
    slash=st.booleans(),
)
def test_listings_are_those_of_a_sorted_dictionary(
    keys: list[str], prefix: str, start: str, slash: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("store"))
    plain: dict[str, bytes] = {}
    for number, key in enumerate(keys):
        try:
            store.put(key, bytes(number))
        except UnsafeKey:
            continue
        plain[key] = bytes(number)
    prefix += "/" if slash and prefix else ""
    found = [(info.key, info.size) for info in store.list(prefix, start)]
    assert found == [(k, len(v)) for k, v in sorted(plain.items()) if k.startswith(prefix) and k > start]


@given(data=st.binary(max_size=40), start=st.none() | st.integers(0, 50), end=st.none() | st.integers(0, 50))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_range_is_a_slice(
    data: bytes, start: int | None, end: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = LocalStore(tmp_path_factory.getbasetemp() / "ranges")
    store.put("k", data)
    assert store.get("k", start, end) == data[start:end]


def test_racing_writers_of_one_folder_all_succeed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    barrier = threading.Barrier(8)

    def write(number: int) -> None:
        barrier.wait(10)
        store.put(f"deep/er/and/deeper/{number}", b"%d" % number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert [info.key[-1] for info in store.list("deep/")] == [str(n) for n in range(8)]


def test_writers_and_deleters_of_one_key_never_tear_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    bodies = [bytes([n]) * 50_000 for n in range(4)]

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(40):
            what = dice.randrange(4)
            if what == 0:
                store.delete("k/x")
            elif what == 1:
                with suppress(AlreadyExists):
                    store.put("k/x", dice.choice(bodies), create_only=True)
            elif what == 2:
                store.put("k/x", dice.choice(bodies))
            else:
                with suppress(NoSuchKey):
                    assert store.get("k/x") in bodies
                assert [info.size for info in store.list("k/")] in ([], [50_000])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [path for path in (tmp_path / "k").iterdir() if path.name != "x"] == []


def test_sweeping_takes_old_temporary_files_below_the_prefix_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("runs/a/x", b"1")
    for name, age in (("runs/a/.old.part", 1_000), ("runs/a/.new.part", 5_000), ("runs/b/.old.part", 1_000)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
        os.utime(path, (age, age))
    os.utime(tmp_path / "runs/a/x", (1, 1))
    assert store.sweep_unfinished("runs/a/", 2_000) == 1
    assert sorted(p.name for p in (tmp_path / "runs/a").iterdir()) == [".new.part", "x"]
    assert (tmp_path / "runs/b/.old.part").exists()
    assert store.sweep_unfinished("runs/", 10_000) == 2
    assert store.sweep_unfinished("nowhere/", 10_000) == 0
    assert store.get("runs/a/x") == b"1"


def test_a_durable_put_is_as_visible_as_any(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "new" / "root", durable=True)
    store.put("a/b/c", b"1", create_only=True)
    store.put("a/b/c", b"2")
    with pytest.raises(AlreadyExists):
        store.put("a/b/c", b"3", create_only=True)
    assert LocalStore(tmp_path / "new" / "root").get("a/b/c") == b"2"


def _errno(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [(28, StoreUnavailable, "free disk space"), (30, StoreRefused, "hard links"), (95, StoreRefused, "hard links"),
     (5, StoreUnavailable, "cannot write k"), (13, StoreRefused, "check owner and mount")],
)  # fmt: skip
def test_faults_of_the_disk_are_sorted_into_repeat_and_ask_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], says: str
) -> None:
    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "link", _errno(number))
    with pytest.raises(kind, match=says):
        store.put("k", b"1", create_only=True)
    assert list(tmp_path.iterdir()) == []


@given(st.lists(PARTS, min_size=1, max_size=4).map("/".join))
def test_safe_keys_are_returned_and_end_as_prefixes(key: str) -> None:
    assert check_key(key) == key
    assert check_prefix(key) == key
    assert check_prefix(key + "/") == key + "/"
    assert check_prefix("") == ""


@pytest.mark.parametrize(
    "key", ["a/./b", "a/..", ".a", "a\0", "a\n", "a b", "a/" + "x" * 201, "a:b", "a%2e", "\u200b", "a*", "~/../x"]
)
def test_keys_that_a_store_could_spell_differently_are_refused(key: str) -> None:
    for check in (check_key, check_prefix):
        with pytest.raises(UnsafeKey, match="is refused"):
            check(key)
    with pytest.raises(UnsafeKey):
        check_prefix("a//")


def test_a_sweep_without_the_right_to_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    (tmp_path / "a" / ".0123.part").write_bytes(b"ha")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StoreRefused, match=r"cannot sweep a/: Permission denied; check owner"):
        store.sweep_unfinished("a/", 2e12)
