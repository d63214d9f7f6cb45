"""Both stores against a plain dictionary, over random writes, commits, aborts and taken-back calls."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline.runtime.sqlite_store import SqliteStore
from headrace.pipeline.runtime.store import MAX_VALUE_BYTES, MemoryStore, OverlayStore, StoreView
from headrace.schemas.errors import InvalidRecord

Make = Callable[[], OverlayStore]


@pytest.fixture(scope="module", params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes a store of either kind; what is made is closed at the end."""
    made: list[OverlayStore] = []

    def one() -> OverlayStore:
        for old in made[:-8]:
            old.close()
        del made[:-8]
        made.append(MemoryStore() if request.param == "memory" else SqliteStore(Path(folder), "state"))
        return made[-1]

    with tempfile.TemporaryDirectory() as folder:
        yield one
        for store in made:
            store.close()


keys = st.sampled_from([b"a", b"ab", b"b", b"ba", b"c"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), keys, st.binary(max_size=3)),
        st.tuples(st.just("delete"), keys, st.just(b"")),
        st.tuples(st.sampled_from(["commit", "abort", "mark", "undo"]), st.just(b""), st.just(b"")),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(steps)
def test_store_equals_a_dictionary_with_snapshots(make: Make, steps: list[tuple[str, bytes, bytes]]) -> None:
    store = make()
    log: list[tuple[bytes, bytes | None]] = []
    now: dict[bytes, bytes] = {}
    committed: dict[bytes, bytes] = {}
    marked: dict[bytes, bytes] = {}
    for kind, key, value in steps:
        if kind == "put":
            store.put(key, value)
            now[key] = value
        elif kind == "delete":
            store.delete(key)
            now.pop(key, None)
        elif kind == "mark":
            store.mark()
            marked = dict(now)
        elif kind == "undo":
            store.undo()
            now = dict(marked)
        elif kind == "commit":
            log += store.changes()
            store.commit()
            committed, marked = dict(now), dict(now)
        else:
            store.abort()
            now, marked = dict(committed), dict(committed)
        assert dict(store.scan(b"")) == now
        assert [k for k, _ in store.scan(b"a")] == sorted(k for k in now if k.startswith(b"a"))
        assert all(store.get(k) == now.get(k) for k in (b"a", b"ab", b"b", b"ba", b"c"))
    restored = make()
    restored.restore(log)
    assert dict(restored.scan(b"")) == committed


def test_a_key_born_and_gone_in_one_transaction_leaves_no_tombstone(make: Make) -> None:
    store = make()
    store.put(b"k", b"v")
    store.delete(b"k")
    assert store.changes() == []
    store.put(b"k", b"v")
    store.commit()
    store.delete(b"k")
    assert store.changes() == [(b"k", None)]


def test_scan_is_a_snapshot(make: Make) -> None:
    view = StoreView(make(), b"s")
    view.put(b"a", b"1")
    entries = view.scan()
    view.put(b"b", b"2")
    assert list(entries) == [(b"a", b"1")]


def test_view_hides_other_kinds_of_entries(make: Make) -> None:
    store = make()
    store.put(b"p", b"positions")
    view = StoreView(store, b"s")
    view.put(b"key", b"value")
    assert list(view.scan()) == [(b"key", b"value")]
    assert store.get(b"skey") == b"value"


def test_a_value_that_no_changelog_record_can_hold_is_refused(make: Make) -> None:
    with pytest.raises(InvalidRecord, match="over the limit"):
        make().put(b"k", bytes(MAX_VALUE_BYTES))


def test_only_what_is_retained_stays(make: Make) -> None:
    store = make()
    store.restore([(b"a", b"1"), (b"b", b"2"), (b"c", b"3"), (None, b"no key")])
    assert (len(store), store.nbytes()) == (3, 6)
    assert store.retain({b"b", b"x"}) == 2
    assert list(store.scan(b"")) == [(b"b", b"2")]
    assert store.retain(()) == 1
    assert (len(store), store.nbytes()) == (0, 0)


def test_a_commit_of_the_largest_value_and_of_every_byte_as_key(make: Make) -> None:
    store = make()
    for n in range(256):
        store.put(bytes([n]), bytes([n]))
    store.put(b"", bytes(MAX_VALUE_BYTES))
    store.commit()
    assert [k for k, _ in store.scan(b"")] == [b"", *(bytes([n]) for n in range(256))]
    assert len(store.get(b"") or b"") == MAX_VALUE_BYTES
    assert list(store.scan(b"\xff")) == [(b"\xff", b"\xff")]
