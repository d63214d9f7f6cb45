"""What counts as read to the end, and what as an outage."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.pipeline.runtime import frontier as module
from headrace.pipeline.runtime.frontier import Frontier, Place

A, B = ("ledger", 0), ("steps", 0)


class Broker:
    """Ends of partitions, and whether anybody answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: dict[Place, int] | None = {A: 0, B: 0}
        self.newest: dict[Place, int] = {}
        self.asked = 0
        self.seconds = 1000.0
        self.outages: list[tuple[int, int]] = []
        monkeypatch.setattr(module.time, "monotonic", lambda: self.seconds)

    def frontier(self) -> Frontier:
        return Frontier(self.ask, lambda p: self.newest.get(p, 0), lambda s, e: self.outages.append((s, e)), self.clock)

    def ask(self, places: Sequence[Place]) -> dict[Place, int] | None:
        self.asked += 1
        return None if self.ends is None else {p: self.ends[p] for p in places}

    def clock(self) -> int:
        return int(self.seconds * 1000)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    return Broker(monkeypatch)


def test_after_an_assignment_the_ends_are_asked_for_once(broker: Broker) -> None:
    broker.ends = {A: 5, B: 0}
    frontier = broker.frontier()
    frontier.attach({A: 0, B: 0})
    assert not frontier.caught_up([A, B])
    broker.newest = {A: 5}
    for offset in range(4):
        frontier.read(A, offset)
    assert not frontier.caught_up([A]), "the marker at 4 is not passed yet"
    assert frontier.caught_up([B])
    frontier.read_to_end(A, 5)
    assert frontier.caught_up([A, B])
    assert broker.asked == 1
    for _ in range(100):
        assert frontier.caught_up([A, B])
    assert broker.asked == 1


def test_markers_do_not_look_like_records_and_a_backlog_does(broker: Broker) -> None:
    frontier = broker.frontier()
    frontier.attach({A: 0})
    assert frontier.caught_up([A])
    broker.newest = {A: module.SLACK}
    assert frontier.caught_up([A])
    broker.newest = {A: module.SLACK + 1}
    assert not frontier.caught_up([A])
    frontier.read_to_end(A, 0)
    assert frontier.caught_up([A]), "all beyond belongs to open transactions"


def test_silence_is_asked_about_and_becomes_an_outage(broker: Broker) -> None:
    frontier = broker.frontier()
    frontier.attach({A: 0})
    assert frontier.caught_up([A])
    broker.seconds += 1.5
    assert frontier.caught_up([A])
    assert broker.outages == []
    broker.ends = None
    broker.seconds += 30
    assert not frontier.caught_up([A]), "nobody answers"
    broker.ends = {A: 3}
    broker.seconds += 1
    assert frontier.probe()
    assert broker.outages == [(1001500, 1032500)]
    assert frontier.outage_end_ms == 1032500
    assert not frontier.caught_up([A]), "what came meanwhile is not read"
    frontier.read_to_end(A, 3)
    assert frontier.caught_up([A])


def test_a_frozen_process_counts_as_an_outage(broker: Broker) -> None:
    frontier = broker.frontier()
    frontier.attach({A: 0})
    broker.seconds += 60
    frontier.heard()
    assert len(broker.outages) == 1


def test_questions_are_at_most_ten_a_second(broker: Broker) -> None:
    broker.ends = None
    frontier = broker.frontier()
    frontier.attach({A: 0})
    for _ in range(50):
        frontier.caught_up([A])
        broker.seconds += 0.01
    assert broker.asked <= 6


def test_reached_and_detach(broker: Broker) -> None:
    frontier = broker.frontier()
    frontier.attach({A: 3, B: 1})
    assert frontier.reached({A: 3})
    assert not frontier.reached({A: 3, B: 2})
    frontier.detach([A])
    assert not frontier.reached({A: 0})
    frontier.read_to_end(A, 9)
    assert A not in frontier.positions


def test_a_long_computation_is_no_outage_and_a_frozen_one_is(broker: Broker) -> None:
    frontier = broker.frontier()
    frontier.attach({A: 0})
    broker.seconds += 4.0
    frontier.worked(3.5)
    frontier.heard()
    assert broker.outages == [], "a stage that decides for 3.5 s keeps its worker from hearing the broker, no more"
    broker.seconds += 4.0
    frontier.worked(0.2)
    frontier.heard()
    assert len(broker.outages) == 1, "most of that time this process did nothing"
    broker.seconds += 1.0
    frontier.worked(60.0)
    assert frontier.probe(), "work never counts beyond this moment"
    broker.seconds += 3.0
    frontier.heard()
    assert len(broker.outages) == 2
