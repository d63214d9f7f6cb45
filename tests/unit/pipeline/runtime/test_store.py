"""The store against a plain dictionary, over random writes, commits, aborts and taken-back calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline.runtime.store import MAX_VALUE_BYTES, MemoryStore, StoreView
from headrace.schemas.errors import InvalidRecord

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
def test_store_equals_a_dictionary_with_snapshots(steps: list[tuple[str, bytes, bytes]]) -> None:
    store = MemoryStore()
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
    restored = MemoryStore()
    restored.restore(log)
    assert dict(restored.scan(b"")) == committed


def test_a_key_born_and_gone_in_one_transaction_leaves_no_tombstone() -> None:
    store = MemoryStore()
    store.put(b"k", b"v")
    store.delete(b"k")
    assert store.changes() == []
    store.put(b"k", b"v")
    store.commit()
    store.delete(b"k")
    assert store.changes() == [(b"k", None)]


def test_scan_is_a_snapshot() -> None:
    view = StoreView(MemoryStore(), b"s")
    view.put(b"a", b"1")
    entries = view.scan()
    view.put(b"b", b"2")
    assert list(entries) == [(b"a", b"1")]


def test_view_hides_other_kinds_of_entries() -> None:
    store = MemoryStore()
    store.put(b"p", b"positions")
    view = StoreView(store, b"s")
    view.put(b"key", b"value")
    assert list(view.scan()) == [(b"key", b"value")]
    assert store.get(b"skey") == b"value"


def test_a_value_that_no_changelog_record_can_hold_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="over the limit"):
        MemoryStore().put(b"k", bytes(MAX_VALUE_BYTES))
