"""Store and timers of a task under random calls, undone, aborted, committed and restored, against plain maps."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline.runtime.attach import _agreed
from headrace.pipeline.runtime.frontier import Place
from headrace.pipeline.runtime.sqlite_store import SqliteStore
from headrace.pipeline.runtime.store import MAX_VALUE_BYTES, MemoryStore, OverlayStore, StoreView
from headrace.pipeline.runtime.timers import TIMER_PREFIX, Timers
from headrace.schemas.errors import InvalidRecord

KEYS = st.sampled_from(["a", "b", "ab", "c", ""])
ACTS = ("put", "delete", "arm", "disarm", "fire", "shift", "mark", "undo", "commit", "abort", "restore")
MOVES = st.lists(st.tuples(st.sampled_from(ACTS), KEYS, st.integers(0, 30)), max_size=60)


@dataclass
class Plain:
    """Entries, and timers as (armed for, due)."""

    entries: dict[bytes, bytes] = field(default_factory=dict)
    timers: dict[str, tuple[int, int]] = field(default_factory=dict)

    def first(self) -> tuple[int, str] | None:
        return min(((due, key) for key, (_, due) in self.timers.items()), default=None)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@settings(max_examples=150, deadline=None)
@given(moves=MOVES)
def test_every_history_of_calls_leaves_what_plain_maps_would(
    tmp_path_factory: pytest.TempPathFactory, kind: str, moves: list[tuple[str, str, int]]
) -> None:
    folder = tmp_path_factory.getbasetemp()

    def make() -> OverlayStore:
        return MemoryStore() if kind == "memory" else SqliteStore(folder, "state")

    memory = make()
    store, timers = StoreView(memory, b"s"), Timers(memory)
    log: list[tuple[bytes | None, bytes | None]] = []
    now, committed, marked = Plain(), Plain(), Plain()
    for move, key, number in moves:
        name, value = key.encode(), bytes([number])
        if move == "put":
            store.put(name, value)
            now.entries[name] = value
        elif move == "delete":
            store.delete(name)
            now.entries.pop(name, None)
        elif move == "arm":
            timers.arm(key, number)
            now.timers[key] = (number, number)
        elif move == "disarm":
            timers.disarm(key)
            now.timers.pop(key, None)
        elif move == "fire":
            first = now.first()
            wanted = None
            if first is not None and first[0] <= number:
                wanted = (first[1], now.timers.pop(first[1])[0])
            assert timers.pop_due(number) == wanted
        elif move == "shift":
            moved = {k: (at, due + 5) for k, (at, due) in now.timers.items() if due >= number}
            assert timers.shift(number, number + 5) == len(moved)
            now.timers |= moved
        elif move == "mark":
            memory.mark()
            timers.mark()
            marked = deepcopy(now)
        elif move == "undo":
            memory.undo()
            timers.undo()
            now = deepcopy(marked)
        elif move == "commit":
            log += memory.changes()
            memory.commit()
            committed = deepcopy(now)
        elif move == "abort":
            memory.abort()
            timers.reload()
            now = deepcopy(committed)
        else:
            memory.close()
            memory, now = make(), deepcopy(committed)
            memory.restore(log)
            store, timers = StoreView(memory, b"s"), Timers(memory)
        if move in ("commit", "abort", "restore"):
            memory.mark()
            timers.mark()
            marked = deepcopy(now)
        assert dict(store.scan()) == now.entries
        assert {k: store.get(k.encode()) for k in ("a", "b", "ab", "c", "")} == {
            k: now.entries.get(k.encode()) for k in ("a", "b", "ab", "c", "")
        }
        first = now.first()
        assert timers.next_due_ms() == (None if first is None else first[0]) and len(timers) == len(now.timers)
        assert len(dict(memory.scan(TIMER_PREFIX))) == len(now.timers), "timers are entries of the store"
    memory.close()


@settings(max_examples=100, deadline=None)
@given(
    first=st.dictionaries(st.binary(max_size=2), st.binary(max_size=2)),
    then=st.dictionaries(st.binary(max_size=2), st.none() | st.binary(max_size=2)),
)
def test_a_changelog_says_what_changed_and_no_more(first: dict[bytes, bytes], then: dict[bytes, bytes | None]) -> None:
    memory = MemoryStore()
    for key, value in first.items():
        memory.put(key, value)
    memory.commit()
    for key, changed in then.items():
        if changed is None:
            memory.delete(key)
        else:
            memory.put(key, changed)
    changes = memory.changes()
    assert len({key for key, _ in changes}) == len(changes)
    assert {k for k, v in changes if v is None} <= set(first), "no tombstone for what was never there"
    copy = MemoryStore()
    copy.restore([*first.items(), *changes])
    memory.commit()
    assert dict(copy.scan(b"")) == dict(memory.scan(b"")) and not memory.dirty


def test_a_value_that_no_changelog_record_holds_is_refused_and_changes_nothing() -> None:
    memory = MemoryStore()
    memory.put(b"k", b"old")
    with pytest.raises(InvalidRecord, match="over the limit"):
        memory.put(b"k", bytes(MAX_VALUE_BYTES))
    assert memory.get(b"k") == b"old"
    memory.put(b"k", bytes(MAX_VALUE_BYTES - 1))


def test_a_view_sees_only_what_is_its_own() -> None:
    memory = MemoryStore()
    one, other = StoreView(memory, b"s"), StoreView(memory, b"t")
    one.put(b"k", b"1")
    other.put(b"k", b"2")
    other.delete(b"missing")
    assert (one.get(b"k"), other.get(b"k")) == (b"1", b"2")
    snapshot = one.scan()
    one.put(b"later", b"3")
    assert list(snapshot) == [(b"k", b"1")]


class Restored:
    """A task as far as ``attach`` looks at it: its places and the positions in its changelog."""

    places = (("groups", 0), ("ledger", 0))

    def __init__(self, saved: dict[Place, int] | None) -> None:
        self._saved = saved

    def saved_positions(self) -> dict[Place, int] | None:
        return self._saved


@pytest.mark.parametrize(
    ("saved", "group", "positions"),
    [
        (None, (-1, -1), (0, 0)),
        (None, (5, -1), None),
        (None, (5, 3), None),
        ((5, 3), (5, 3), (5, 3)),
        ((5, 3), (-1, -1), (5, 3)),
        ((5, 3), (-1, 3), (5, 3)),
        ((5, 3), (6, 3), None),
        ((5, 3), (4, 3), None),
        ((5, 3), (0, 0), None),
        ((0, 0), (0, 0), (0, 0)),
    ],
)
def test_positions_are_agreed_by_group_and_changelog_or_refused(
    saved: tuple[int, int] | None, group: tuple[int, int], positions: tuple[int, int] | None
) -> None:
    places = Restored.places
    task = Restored(None if saved is None else dict(zip(places, saved, strict=True)))
    wanted = None if positions is None else dict(zip(places, positions, strict=True))
    offsets = {place: (offset, None) for place, offset in zip(places, group, strict=True)}
    assert _agreed(task, offsets) == wanted  # type: ignore[arg-type]
