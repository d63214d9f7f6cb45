"""One task without a broker: calls that are whole or not at all, timers that wait, transactions that end either way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from toy_worker import Chain, toy, toy_config

from headrace.connectors.kafka import RawRecord
from headrace.connectors.transaction import SWEEP_RECORD, TransactionAborted
from headrace.pipeline.runtime.frontier import Frontier, Place
from headrace.pipeline.runtime.lifecycle import IllegalTransition
from headrace.pipeline.runtime.metrics import Registry
from headrace.pipeline.runtime.stage import Context, Received
from headrace.pipeline.runtime.task import Task, TaskState
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Failed, Record

PLACES: tuple[Place, ...] = (("trajectories", 1), ("admissions", 1))


class Rig:
    """A task, its clock, what it wrote, and the ends that a broker would tell."""

    def __init__(self, stage: Any = Chain) -> None:
        self.now = 1_000_000
        self.written: list[tuple[str, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = []
        self.ends: dict[Place, int] | None = dict.fromkeys(PLACES, 0)
        self.paused: list[tuple[list[Place], bool]] = []
        self.fail: Exception | None = None
        self.registry = Registry()
        self.frontier = Frontier(self._ask, lambda _p: 0, lambda _s, _e: None, lambda: self.now)
        self.changelog: list[tuple[bytes | None, bytes | None]] = []
        self.task = self.make(stage)
        self.task.move_to(TaskState.RESTORING)
        self.frontier.attach(dict.fromkeys(PLACES, 0))
        self.task.start()

    def make(self, stage: Any) -> Task:
        return Task(
            config=toy_config("toy"),
            sub_topology="assemble",
            number=1,
            places=PLACES,
            factory=stage,
            sink=self._write,
            frontier=self.frontier,
            metrics=self.registry,
            clock=lambda: self.now,
            pause=lambda places, paused: self.paused.append((places, paused)),
        )

    def _ask(self, places: Sequence[Place]) -> dict[Place, int] | None:
        return None if self.ends is None else {p: self.ends[p] for p in places}

    def _write(self, topic: str, partition: int, key: Any, value: Any, headers: Any) -> None:
        if self.fail is not None:
            raise self.fail
        self.written.append((topic, partition, key, value, headers))

    def take(self, record: Record | bytes, offset: int, headers: Any = ()) -> None:
        self.task.take(
            RawRecord(
                topic="admissions",
                partition=1,
                offset=offset,
                timestamp_ms=self.now,
                key=b"key %d" % offset,
                value=record if isinstance(record, bytes) else encode(record),
                headers=list(headers),
            )
        )

    def commit(self) -> None:
        before = len(self.written)
        self.task.write_changelog()
        self.changelog += [(key, value) for _, _, key, value, _ in self.written[before:]]
        self.task.commit()

    def outputs(self, topic: str = "groups") -> list[Failed]:
        return [r for t, _, _, v, _ in self.written if t == topic and isinstance(r := decode(v), Failed)]


def counts(rig: Rig) -> list[tuple[int, int]]:
    return [(r.group, r.replica) for r in rig.outputs()]


def test_a_record_that_raises_leaves_a_dead_letter_and_nothing_else() -> None:
    rig = Rig()
    rig.take(toy(1), 0)
    rig.take(toy(2, "boom"), 1)
    rig.take(b"garbage", 2)
    rig.take(toy(3), 3)
    assert counts(rig) == [(1, 1), (3, 2)]
    letters = [(k, v, dict(h)["__streams.errors.offset"]) for t, _, k, v, h in rig.written if t == "dead-letters"]
    assert letters == [(b"key 1", encode(toy(2, "boom")), b"1"), (b"key 2", b"garbage", b"2")]
    labels = {"stage": "assemble", "topic": "admissions"}
    assert rig.registry.value("dead_letters_total", error="ValueError", **labels) == 1
    assert rig.task.positions()["admissions", 1] == 4


def test_an_aborted_transaction_never_was() -> None:
    rig = Rig()
    rig.take(toy(1), 0)
    rig.commit()
    rig.take(toy(2), 1)
    assert rig.task.reset() == {("trajectories", 1): 0, ("admissions", 1): 1}
    rig.task.reopen()
    assert not rig.task.dirty
    rig.take(toy(2), 1)
    assert counts(rig) == [(1, 1), (2, 2), (2, 2)]


def test_a_restored_task_goes_on_where_the_last_commit_was() -> None:
    rig = Rig()
    rig.take(toy(1), 0)
    rig.take(toy(2, f"timer:{rig.now + 5}"), 1)
    rig.commit()
    other = Rig()
    task = other.make(Chain)
    task.move_to(TaskState.RESTORING)
    task.stores["state"].restore(rig.changelog)
    assert task.saved_positions() == {("trajectories", 1): 0, ("admissions", 1): 2}
    task.start()
    assert task.next_due_ms() == rig.now + 5
    other.task = task
    other.take(toy(3), 2)
    assert counts(other) == [(3, 3)]


def test_time_in_which_nobody_ran_the_task_does_not_count_towards_its_timers() -> None:
    rig = Rig()
    due = rig.now + 1_000
    rig.take(toy(1, f"timer:{due}"), 0)
    rig.commit()
    later = Rig()
    later.now = rig.now + 60_000
    task = later.make(Chain)
    task.move_to(TaskState.RESTORING)
    task.stores["state"].restore(rig.changelog)
    task.start()
    assert task.next_due_ms() == due + 60_000


def test_a_timer_waits_for_what_lay_in_the_inputs_when_it_was_due() -> None:
    rig = Rig()
    rig.take(toy(0, f"timer:{rig.now + 10}"), 0)
    rig.task.fire_timers()
    rig.now += 10
    rig.ends = {("trajectories", 1): 0, ("admissions", 1): 3}
    rig.task.fire_timers()
    rig.take(toy(1), 1)
    rig.ends = {("trajectories", 1): 0, ("admissions", 1): 99}
    rig.task.fire_timers()
    assert rig.outputs("ledger") == []
    rig.take(toy(2), 2)
    rig.task.fire_timers()
    assert [r.reason for r in rig.outputs("ledger")] == [f"{rig.now} 3"]
    rig.task.fire_timers()
    assert len(rig.outputs("ledger")) == 1


def test_no_timer_fires_without_a_broker() -> None:
    rig = Rig()
    rig.take(toy(0, f"timer:{rig.now}"), 0)
    rig.ends = None
    rig.task.fire_timers()
    assert rig.outputs("ledger") == []
    rig.task.shift_timers(rig.now, rig.now + 500)
    rig.ends = {("trajectories", 1): 0, ("admissions", 1): 1}
    rig.task.fire_timers()
    assert rig.outputs("ledger") == []
    rig.now += 500
    rig.task.fire_timers()
    assert len(rig.outputs("ledger")) == 1


def test_swept_records_are_passed_over() -> None:
    rig = Rig()
    rig.take(b"", 0, [("hr-record", SWEEP_RECORD)])
    assert rig.written == []
    assert rig.task.positions()["admissions", 1] == 1


def test_faults_of_the_transaction_and_of_the_configuration_are_not_the_records_fault() -> None:
    rig = Rig()
    rig.fail = TransactionAborted("broker says so")
    with pytest.raises(TransactionAborted):
        rig.take(toy(1), 0)

    class Refuses(Chain):
        def process(self, received: Received, context: Context) -> None:
            raise ConfigurationError("change something")

    with pytest.raises(ConfigurationError):
        Rig(Refuses).take(toy(1), 0)


def test_pauses_are_told_once_and_forgotten_with_the_transaction() -> None:
    class Pauses(Chain):
        def act(self, context: Context) -> None:
            context.set_paused("admissions", True)

    rig = Rig(Pauses)
    rig.task.act()
    rig.task.act()
    assert rig.paused == [([("admissions", 1)], True)]
    assert rig.task.paused_places == [("admissions", 1)]
    rig.task.reset()
    assert rig.task.paused_places == []


def test_a_record_that_may_not_travel_fails_the_call_that_made_it() -> None:
    class Huge(Chain):
        def process(self, received: Received, context: Context) -> None:
            context.store().put(b"half", b"done")
            context.emit("groups", toy(1, "x" * (8 << 20)), partition=0)

    rig = Rig(Huge)
    rig.take(toy(1), 0)
    assert [t for t, *_ in rig.written] == ["dead-letters"]
    assert "over the limit" in (dict(rig.written[0][4])["__streams.errors.message"] or b"").decode()
    rig.commit()
    assert b"shalf" not in dict(rig.changelog)


class Taking(Chain):
    """A stage that takes something when it is opened."""

    taken: int = 0

    def open(self, context: Context) -> None:
        super().open(context)
        Taking.taken += 1

    def close(self) -> None:
        Taking.taken -= 1


def test_what_a_stage_took_is_let_go_when_it_is_replaced_and_when_its_task_ends() -> None:
    Taking.taken = 0
    rig = Rig(Taking)
    assert Taking.taken == 1
    rig.task.reset()
    rig.task.reopen()
    assert Taking.taken == 1
    rig.task.close()
    assert Taking.taken == 0


def test_a_task_lives_by_its_transitions() -> None:
    rig = Rig()
    for state in (TaskState.SUSPENDED, TaskState.CLOSED):
        rig.task.move_to(state)
    with pytest.raises(IllegalTransition, match=r"assemble\[1\] cannot go from closed to running"):
        rig.task.move_to(TaskState.RUNNING)
