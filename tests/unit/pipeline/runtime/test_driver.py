"""The driver keeps the promises of ``stage.Context``: atomic calls and turns, timers that wait, crashes."""

from __future__ import annotations

from typing import Any

import pytest
from stage_feed import make_config, make_opened, make_step

from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.pipeline.runtime.stage import Context, Received
from headrace.schemas.errors import InvalidRecord
from headrace.schemas.records import Opened


class Echo:
    """Counts what it reads; writes one record and arms one timer for each; can be told to fail."""

    def __init__(self) -> None:
        self.count = 0
        self.fired: list[tuple[str, int]] = []
        self.fail: Exception | None = None
        self.caught: list[bool] = []

    def open(self, context: Context) -> None:
        self.count = int(context.store().get(b"count") or 0)

    def process(self, received: Received, context: Context) -> None:
        self.count += 1
        context.store().put(b"count", str(self.count).encode())
        context.emit("run", make_opened(self.count), partition=0)
        context.schedule(f"at/{self.count}", context.now() + 100)
        if self.fail is not None:
            raise self.fail

    def on_timer(self, key: str, at_ms: int, context: Context) -> None:
        self.fired.append((key, self.count))

    def act(self, context: Context) -> None:
        self.caught.append(context.caught_up())

    def finished(self) -> bool:
        return False


def made() -> tuple[TopologyDriver, list[Echo]]:
    """A driver with Echo in the place of ``schedule``; the list has every instance that was opened."""
    stages: list[Echo] = []

    def factory(config: Any, number: int) -> Echo:
        stages.append(Echo())
        return stages[-1]

    return TopologyDriver(make_config(), {"schedule": factory}), stages


def steps(driver: TopologyDriver, count: int = 1) -> None:
    for _ in range(count):
        driver.append("steps", make_step(1))


def written(driver: TopologyDriver) -> list[int]:
    return [r.group for r in driver.records("run") if isinstance(r, Opened)]


def only_steps(place: tuple[str, int], waiting: int) -> int:
    return waiting if place[0] == "steps" else 0


def test_a_crash_before_the_commit_leaves_no_trace_and_the_input_is_read_again() -> None:
    driver, stages = made()
    steps(driver, 2)
    driver.turn("schedule", read=only_steps, crash="before_commit")
    assert written(driver) == []
    driver.turn("schedule", read=only_steps)
    assert written(driver) == [1, 2]
    assert [s.count for s in stages] == [2, 2]


def test_a_crash_after_the_commit_loses_the_memory_only() -> None:
    driver, stages = made()
    steps(driver)
    driver.turn("schedule", read=only_steps, crash="after_commit")
    steps(driver)
    driver.turn("schedule", read=only_steps)
    assert written(driver) == [1, 2]
    assert stages[1].count == 2


def test_a_failing_call_leaves_nothing_half_done_and_goes_to_dead_letters() -> None:
    driver, stages = made()
    steps(driver)
    driver.turn("schedule", read=only_steps)
    stages[0].fail = InvalidRecord("no")
    steps(driver)
    driver.turn("schedule", read=only_steps)
    assert written(driver) == [1]
    assert [(r.topic, r.offset, str(e)) for r, e in driver.dead_letters] == [("steps", 1, "no")]
    steps(driver)
    driver.turn("schedule", read=only_steps)
    assert written(driver) == [1, 2]
    assert stages[1].count == 2, "a new instance from the store as it was before the call"
    driver.now_ms += 100
    driver.turn("schedule", read=only_steps)
    assert [key for key, _ in stages[1].fired] == ["at/1", "at/2"], "the failed call armed nothing"


def test_a_fault_of_the_stage_is_not_hidden() -> None:
    driver, stages = made()
    driver.stage_of("schedule")
    stages[0].fail = KeyError("fault")
    steps(driver)
    with pytest.raises(KeyError):
        driver.turn("schedule")


def test_a_timer_waits_until_what_was_there_when_it_became_due_has_been_read() -> None:
    driver, stages = made()
    steps(driver)
    driver.turn("schedule", read=only_steps)
    driver.now_ms += 100
    steps(driver)
    driver.turn("schedule", read=lambda place, waiting: 0)
    assert stages[0].fired == []
    steps(driver)
    driver.turn("schedule", read=lambda place, waiting: min(waiting, 1) if place[0] == "steps" else waiting)
    assert stages[0].fired[0] == ("at/1", 2), "the second record was there, the third came later"


def test_timers_survive_a_crash_and_fire_once() -> None:
    driver, stages = made()
    steps(driver)
    driver.turn("schedule", read=only_steps, crash="after_commit")
    driver.now_ms += 100
    driver.turn("schedule", read=only_steps, crash="before_commit")
    driver.turn("schedule", read=only_steps)
    driver.turn("schedule", read=only_steps)
    assert [s.fired for s in stages] == [[], [("at/1", 1)], [("at/1", 1)]]


def test_caught_up_is_true_only_at_the_end_of_every_input() -> None:
    driver, stages = made()
    steps(driver, 2)
    driver.turn("schedule", read=lambda place, waiting: min(waiting, 1))
    driver.turn("schedule", read=lambda place, waiting: min(waiting, 1))
    assert stages[0].caught == [False, True]


def test_an_unknown_partition_is_refused() -> None:
    class Astray(Echo):
        def act(self, context: Context) -> None:
            context.emit("run", make_opened(0), partition=1)

    driver = TopologyDriver(make_config(), {"schedule": lambda config, number: Astray()})
    with pytest.raises(ValueError, match="run has no partition 1"):
        driver.turn("schedule")


def test_a_run_that_does_not_come_to_rest_is_named() -> None:
    class Restless(Echo):
        def act(self, context: Context) -> None:
            context.emit("run", make_opened(0), partition=0)

    driver = TopologyDriver(make_config(), {"schedule": lambda config, number: Restless()})
    with pytest.raises(RuntimeError, match="did not come to rest within 50 turns"):
        driver.settle(limit=50)
