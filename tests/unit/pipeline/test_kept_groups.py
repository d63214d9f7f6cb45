"""What ``batch`` holds: early groups, kept ones by value, the pool."""

from __future__ import annotations

from typing import cast

from stage_feed import make_members

from headrace.pipeline.kept_groups import KeptGroups
from headrace.pipeline.runtime.store import MemoryStore, StoreView
from headrace.schemas.codec import to_plain
from headrace.schemas.records import Group, Member


def arrive(held: KeptGroups, store: StoreView, number: int, oldest: int = 0) -> None:
    *members, group = make_members(number, oldest)
    for member in members:
        held.add_member(cast(Member, member), store)
    held.add_group(cast(Group, group), store)


def test_an_unknown_group_is_early_above_the_highest_opened_and_over_below_it() -> None:
    store, held = StoreView(MemoryStore(), b"s"), KeptGroups()
    assert held.expects(5)
    arrive(held, store, 5, oldest=2)
    assert held.early == {5: 2} and held.kept == {}
    assert not held.expects(5), "a repeat"
    assert held.opened(5, 0, store)
    assert held.kept == {5: 2} and held.early == {}
    assert not held.opened(5, 0, store)
    assert not held.expects(3) and not held.expects(5)
    assert held.expects(6)


def test_everything_comes_back_from_the_store_and_nothing_stays_of_the_discarded() -> None:
    memory = MemoryStore()
    store, held = StoreView(memory, b"s"), KeptGroups()
    for number in (0, 1, 2):
        held.opened(number, 4, store)
    arrive(held, store, 0, 5)
    arrive(held, store, 1, 6)
    arrive(held, store, 9, 7)
    first = held.take([0], store, pooled=True)
    again = KeptGroups()
    again.load(store)
    assert (again.open, again.kept, again.early, again.highest) == ({2: 4}, {1: 6}, {9: 7}, 2)
    assert [(c.group.group, c.uses, c.entered, c.last_used) for c in again.pooled()] == [(0, 1, 1, 1)]
    replayed = again.replay([0], store)
    assert (first[0].use, replayed[0].use) == (0, 1)
    assert [(c.group.group, c.uses, c.entered, c.last_used) for c in again.pooled()] == [(0, 2, 1, 2)]
    assert [to_plain(m) for m in replayed[0].members] == [to_plain(m) for m in first[0].members]
    again.clear_pool(store)
    for number in (1, 2, 9):
        again.discard(number, store)
    assert [key for key, _ in store.scan()] == [b"highest", b"used"]


def test_the_pool_keeps_the_order_of_first_and_of_newest_use_and_loses_the_old_and_the_first() -> None:
    store, held = StoreView(MemoryStore(), b"s"), KeptGroups()
    for number in range(5):
        held.opened(number, 0, store)
        arrive(held, store, number, oldest=number)
    held.take(range(5), store, pooled=True)
    held.replay([1, 0], store)
    assert [c.group.group for c in held.pooled()] == [2, 3, 4, 1, 0], "the longest unused first"
    again = KeptGroups()
    again.load(store)
    assert again.pooled() == held.pooled()
    held.trim_pool(3, 1, store)
    assert [c.group.group for c in held.pooled()] == [2, 3, 4], "0 is too old, 1 was the first to enter"


def test_a_group_discarded_between_its_members_leaves_nothing() -> None:
    store, held = StoreView(MemoryStore(), b"s"), KeptGroups()
    held.opened(0, 0, store)
    held.add_member(cast(Member, make_members(0)[0]), store)
    assert held.discard(0, store) is None
    assert not held.expects(0)
    assert [key for key, _ in store.scan()] == [b"highest"]
