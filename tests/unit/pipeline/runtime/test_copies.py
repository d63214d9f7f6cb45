"""Copies of stores over a scripted consumer: what is read, in which slices, from where, what compaction may hide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from headrace.pipeline.runtime import copies as module
from headrace.pipeline.runtime.copies import Copies
from headrace.pipeline.runtime.metrics import Registry, StageMetrics
from headrace.pipeline.runtime.store import MemoryStore

TOPIC = "assemble-state-changelog"


@dataclass
class Said:
    """One message of the scripted consumer."""

    number: int
    at: int
    entry: tuple[bytes, bytes | None] | None = None
    code: int | None = None

    def topic(self) -> str:
        return f"run.{TOPIC}"

    def partition(self) -> int:
        return self.number

    def offset(self) -> int:
        return self.at

    def error(self) -> KafkaError | None:
        return None if self.code is None else KafkaError(self.code)

    def key(self) -> bytes | None:
        return self.entry[0] if self.entry else None

    def value(self) -> bytes | None:
        return self.entry[1] if self.entry else None

    def __len__(self) -> int:
        return len(self.value() or b"")


class Log:
    """A changelog in memory with its consumer: entries by offset, so that compaction can take some out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: dict[int, dict[int, tuple[bytes, bytes | None]]] = {}
        self.end: dict[int, int] = {}
        self.first = 0
        self.polled = 0
        self.assigned: dict[int, int] = {}
        self._told: set[tuple[int, int]] = set()
        self.seconds = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.seconds)
        self.registry = Registry()
        connection = SimpleNamespace(run="run", consumer=lambda *_a, **_k: self, topic=lambda name: f"run.{name}")
        self.copies = Copies(connection, "w", self._start, StageMetrics(self.registry, "assemble"), 1000)  # type: ignore[arg-type]

    def _start(self, _place: tuple[str, int]) -> int:
        return self.first

    def write(self, number: int, entries: Iterable[tuple[bytes, bytes | None]]) -> int:
        log = self.entries.setdefault(number, {})
        for entry in entries:
            log[self.end.setdefault(number, 0)] = entry
            self.end[number] += 2
        return self.end.get(number, 0)

    def restored(self, kind: str = "restored") -> float:
        return self.registry.value(f"{kind}_records_total", stage="assemble")

    # the consumer

    def assign(self, places: list[Any]) -> None:
        self.assigned = {place.partition: place.offset for place in places}
        self._told = set()

    def poll(self, timeout: float) -> Said | None:
        self.polled += 1
        for number, at in self.assigned.items():
            if at < self.first:
                return Said(number, at, code=KafkaError._AUTO_OFFSET_RESET)
            left = [offset for offset in self.entries.get(number, {}) if offset >= at]
            if left:
                self.assigned[number] = min(left) + 1
                return Said(number, min(left), self.entries[number][min(left)])
            end = self.end.get(number, 0)
            if (number, end) not in self._told:
                self._told.add((number, end))
                self.assigned[number] = end
                return Said(number, end, code=KafkaError._PARTITION_EOF)
        self.seconds += timeout
        return None

    def close(self) -> None:
        pass


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


def stores() -> dict[str, MemoryStore]:
    return {TOPIC: MemoryStore()}


def state(held: Mapping[str, Any]) -> dict[bytes, bytes]:
    return dict(held[TOPIC].scan(b""))


def fill(count: int) -> list[tuple[bytes, bytes | None]]:
    return [(b"k%d" % n, b"v%d" % n) for n in range(count)]


def test_a_restoration_folds_all_up_to_its_end_and_no_more(log: Log) -> None:
    end = log.write(0, [*fill(10), (b"k3", None)])
    log.write(0, [(b"later", b"of somebody else's")])
    mine = stores()
    log.copies.restore(0, mine, {TOPIC: end})
    assert not log.copies.restored(0)
    log.copies.read(1.0, wait=True)
    assert log.copies.restored(0)
    assert state(mine) == {b"k%d" % n: b"v%d" % n for n in range(10) if n != 3}
    assert log.restored() == 11
    log.copies.restore(0, mine, {TOPIC: log.end[0]})
    log.copies.read(1.0, wait=True)
    assert log.copies.restored(0)
    assert b"later" in state(mine)
    assert log.restored() == 12, "it goes on where it was"


def test_an_empty_changelog_is_restored_at_once(log: Log) -> None:
    log.copies.restore(3, stores(), {TOPIC: 0})
    assert log.copies.restored(3)


def test_a_slice_ends_when_its_time_is_over_and_the_next_goes_on(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    end = log.write(0, fill(1000))
    monkeypatch.setattr(module.time, "monotonic", lambda: log.seconds + log.polled * 0.001)
    log.copies.restore(0, stores(), {TOPIC: end})
    log.copies.read(0.05, wait=False)
    first = log.restored()
    assert 0 < first <= 50 + module._BATCH
    slices = 1
    while not log.copies.restored(0):
        log.copies.read(0.05, wait=False)
        slices += 1
    assert slices > 5
    assert log.restored() == 1000


def test_without_waiting_a_slice_ends_when_nothing_is_there(log: Log) -> None:
    log.copies.restore(0, stores(), {TOPIC: 8})
    log.copies.read(5.0, wait=False)
    assert log.polled == 2, "the end of the partition, then nothing"


def test_who_takes_over_what_is_followed_reads_the_rest_only(log: Log) -> None:
    log.write(1, fill(50))
    log.copies.follow([1], [], lambda _n: stores())
    log.copies.read(1.0, wait=False)
    assert log.restored("followed") == 50
    end = log.write(1, [(b"k0", b"new")])
    held = log.copies.stores_of(1)
    assert held is not None
    log.copies.restore(1, held, {TOPIC: end})
    log.copies.read(1.0, wait=True)
    assert log.copies.restored(1)
    assert log.restored() == 1
    assert state(held)[b"k0"] == b"new"
    assert log.copies.take(1) is not None
    assert len(log.copies) == 0


def test_a_restoration_that_is_called_off_is_not_begun_again(log: Log) -> None:
    end = log.write(0, fill(200))
    mine = stores()
    log.copies.restore(0, mine, {TOPIC: end})
    log.copies._assign()
    for _ in range(100):
        log.copies._take(log.poll(0))  # type: ignore[arg-type]
    log.copies.release(0)
    log.copies.follow([], [0], lambda _n: stores())
    log.copies.restore(0, mine, {TOPIC: end})
    log.copies.read(1.0, wait=True)
    assert log.copies.restored(0)
    assert log.restored() + log.restored("followed") == 200


def test_a_deletion_that_compaction_forgot_meanwhile_is_found_by_a_second_reading(log: Log) -> None:
    end = log.write(0, [(b"gone", b"1"), (b"stays", b"1"), (b"gone", None), (b"last", b"1")])
    mine = stores()
    log.copies.restore(0, mine, {TOPIC: end})
    log.copies._assign()
    log.copies._take(log.poll(0))  # type: ignore[arg-type]
    log.seconds += module.FORGET_SECONDS + 1
    del log.entries[0][0], log.entries[0][4]
    log.copies.read(1.0, wait=True)
    assert state(mine)[b"gone"] == b"1", "the reading alone does not see it"
    assert not log.copies.restored(0)
    log.copies.read(1.0, wait=True)
    assert log.copies.restored(0)
    assert state(mine) == {b"stays": b"1", b"last": b"1"}


def test_a_followed_copy_that_was_away_for_too_long_is_read_anew(log: Log) -> None:
    log.write(0, [(b"gone", b"1")])
    log.copies.follow([0], [], lambda _n: stores())
    log.copies.read(1.0, wait=False)
    log.seconds += module.FORGET_SECONDS + 1
    log.entries[0].clear()
    log.write(0, [(b"new", b"1")])
    for _ in range(2):
        log.copies.read(1.0, wait=False)
        log.copies.compare(lambda places: {place: log.end[place[1]] for place in places})
        log.seconds += module.FOLLOW_EVERY_SECONDS
    log.copies.read(1.0, wait=False)
    held = log.copies.stores_of(0)
    assert held is not None
    assert state(held) == {b"new": b"1"}


def test_a_followed_copy_that_keeps_up_is_kept(log: Log) -> None:
    log.write(0, fill(5))
    log.copies.follow([0], [], lambda _n: stores())
    for number in range(20):
        log.copies.read(1.0, wait=False)
        log.seconds += module.FOLLOW_EVERY_SECONDS
        log.write(0, [(b"k%d" % number, b"always behind")])
        log.copies.compare(lambda places: {place: log.end[place[1]] for place in places})
    assert log.restored("followed") == 5 + 19
    log.copies.compare(lambda _places: None)


def test_copies_that_grow_too_large_are_given_up_and_told(log: Log) -> None:
    log.write(0, [(b"k", bytes(600)), (b"l", bytes(600))])
    log.copies.follow([0], [], lambda _n: stores())
    log.copies.read(1.0, wait=False)
    log.copies.compare(lambda places: {place: log.end[place[1]] for place in places})
    assert log.copies.full
    assert len(log.copies) == 0
    log.copies.follow([0], [], lambda _n: stores())
    assert len(log.copies) == 0
    assert log.registry.value("standby_given_up_total", stage="assemble") == 1


def test_copies_that_were_rewritten_often_are_weighed_not_counted(log: Log) -> None:
    log.write(0, [(b"k", bytes(600))] * 10)
    log.copies.follow([0], [], lambda _n: stores())
    log.copies.read(1.0, wait=False)
    log.copies.compare(lambda places: {place: log.end[place[1]] for place in places})
    assert len(log.copies) == 1


def test_a_changelog_that_was_cut_is_read_from_where_it_begins(log: Log) -> None:
    log.write(0, fill(3))
    mine = stores()
    log.copies.keep(0, mine, {TOPIC: 0}, log.seconds)
    log.entries[0] = {offset: entry for offset, entry in log.entries[0].items() if offset >= 2}
    log.first = 2
    log.copies.restore(0, mine, {TOPIC: log.end[0]})
    log.copies.read(1.0, wait=True)
    assert log.copies.restored(0)
    assert state(mine) == {b"k1": b"v1", b"k2": b"v2"}


def test_a_store_that_was_given_up_long_ago_loses_what_was_deleted_since(log: Log) -> None:
    at, given_up = log.write(0, fill(3)), log.seconds
    mine = stores()
    mine[TOPIC].restore(fill(3))
    log.seconds += module.FORGET_SECONDS + 1
    log.write(0, [(b"k9", b"v9")])
    del log.entries[0][0]  # k0 was deleted meanwhile, and compaction has taken its deletion too
    log.copies.keep(0, mine, {TOPIC: at}, given_up)
    log.copies.restore(0, mine, {TOPIC: log.end[0]})
    log.copies.read(1.0, wait=True)
    assert not log.copies.restored(0)
    log.copies.read(1.0, wait=True)
    assert log.copies.restored(0)
    assert state(mine) == {b"k1": b"v1", b"k2": b"v2", b"k9": b"v9"}


def test_what_is_neither_followed_nor_ones_own_is_forgotten(log: Log) -> None:
    log.copies.follow([0, 1], [], lambda _n: stores())
    log.copies.follow([1], [], lambda _n: stores())
    assert log.copies.stores_of(0) is None
    assert log.copies.stores_of(1) is not None
    log.copies.close()
    assert len(log.copies) == 0
