"""Timers: order, moving, outages, undo, and that they are nothing but entries of the store."""

from __future__ import annotations

from headrace.pipeline.runtime.store import MemoryStore
from headrace.pipeline.runtime.timers import Timers


def fired(timers: Timers, now: int) -> list[tuple[str, int]]:
    out = []
    while (timer := timers.pop_due(now)) is not None:
        out.append(timer)
    return out


def test_timers_fire_once_in_order_of_their_time() -> None:
    timers = Timers(MemoryStore())
    for key, at in (("b", 20), ("a", 10), ("c", 30)):
        timers.arm(key, at)
    assert timers.next_due_ms() == 10
    assert fired(timers, 20) == [("a", 10), ("b", 20)]
    assert fired(timers, 20) == []
    assert timers.next_due_ms() == 30


def test_arming_again_moves_a_timer_both_ways() -> None:
    timers = Timers(MemoryStore())
    timers.arm("a", 50)
    timers.arm("a", 10)
    timers.arm("b", 10)
    timers.arm("b", 60)
    assert fired(timers, 50) == [("a", 10)]
    assert fired(timers, 60) == [("b", 60)]


def test_disarmed_and_unknown_keys_do_not_fire() -> None:
    timers = Timers(MemoryStore())
    timers.arm("a", 10)
    timers.disarm("a")
    timers.disarm("never armed")
    assert fired(timers, 99) == []
    assert timers.next_due_ms() is None


def test_timers_are_entries_of_the_store() -> None:
    store = MemoryStore()
    timers = Timers(store)
    timers.arm("a", 10)
    timers.arm("gone", 5)
    timers.disarm("gone")
    store.commit()
    timers.arm("lost", 7)
    store.abort()
    timers.reload()
    assert fired(timers, 99) == [("a", 10)]
    assert fired(Timers(store), 99) == []


def test_an_outage_moves_what_was_not_due_and_keeps_the_time_it_was_armed_for() -> None:
    store = MemoryStore()
    timers = Timers(store)
    timers.arm("due", 90)
    timers.arm("later", 150)
    assert timers.shift(100, 160) == 1
    store.commit()
    again = Timers(store)
    assert fired(again, 209) == [("due", 90)]
    assert fired(again, 210) == [("later", 150)]


def test_undo_takes_back_one_call() -> None:
    store = MemoryStore()
    timers = Timers(store)
    timers.arm("kept", 10)
    timers.arm("moved", 20)
    store.mark()
    timers.mark()
    timers.disarm("kept")
    timers.arm("moved", 5)
    timers.arm("new", 1)
    timers.undo()
    store.undo()
    assert fired(timers, 99) == [("kept", 10), ("moved", 20)]
    timers.reload()
    assert len(timers) == 0


def test_disarmed_timers_of_a_far_future_take_no_memory() -> None:
    timers = Timers(MemoryStore())
    timers.arm("stays", 10**12)
    for number in range(5000):
        timers.mark()
        timers.arm(f"deadline/{number}", 10**12 + number)
        timers.disarm(f"deadline/{number}")
        if number % 7 == 0:
            timers.undo()
            assert len(timers) == 1
    assert len(timers._heap) < 600
    assert timers.next_due_ms() == 10**12
    assert timers.pop_due(10**13) == ("stays", 10**12)
    assert timers.next_due_ms() is None
