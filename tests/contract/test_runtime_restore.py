"""Tasks that move between workers: restored in slices, resumed without reading, followed; counted in records read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from toy_worker import PARTITIONS, Pile, check_chain, feed, make_run, running, wait_for_chain

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.pipeline.runtime import attach, copies
from headrace.pipeline.runtime.metrics import Registry
from headrace.pipeline.runtime.worker import Worker
from headrace.schemas.config import RunConfig

CHANGELOG = "assemble-state-changelog"
QUICK = {"session.timeout.ms": "3000", "heartbeat.interval.ms": "300"}
RECORDS = 400


class Member:
    """A worker in a thread with its own metrics."""

    def __init__(self, run: tuple[RunConfig, Connection], instance: str) -> None:
        config, connection = run
        self.stop = StopSignal()
        self.metrics = Registry()
        self.worker = Worker(connection, config, "assemble", instance, Pile, stop=self.stop, metrics=self.metrics)

    @contextmanager
    def running(self) -> Iterator[Member]:
        with running(self.worker, self.stop) as errors:
            yield self
        assert not errors

    def count(self, name: str) -> int:
        return int(self.metrics.value(f"{name}_total", stage="assemble"))


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def in_changelog(connection: Connection, *tasks: int) -> int:
    """Committed records in the changelogs of tasks."""
    return sum(1 for _ in connection.read_topic(CHANGELOG, dict.fromkeys(tasks, 0)))


def quiet(connection: Connection) -> None:
    """Wait until nothing is written to the changelog."""
    seen = -1
    while seen != (now := sum(connection.end_offsets(CHANGELOG, committed=False).values())):
        seen = now
        time.sleep(0.3)


def test_tasks_that_stay_are_resumed_unread_and_those_that_come_never_hold_them_up(
    bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(bootstrap, QUICK)
    connection = run[1]
    late = Member(run, "b")
    with late.running():
        done = 4000
        feed(connection, range(done - 100), partitions=(0, 1))
        feed(connection, range(done - 100, done), partitions=(2, 3))
        check_chain(wait_for_chain(connection, done), range(done))
        quiet(connection)
        assert (late.count("tasks_restored"), late.count("restored_records")) == (PARTITIONS, 0)

        early = Member(run, "a")
        with early.running():
            until(lambda: early.count("tasks_restored") == 2 and late.count("tasks_resumed") == 2)
            quiet(connection)
            assert late.count("restored_records") == 0, "what came back was not read again"
            pause = late.metrics.value("last_rebalance_seconds", stage="assemble")
            print(f"the rebalance took {pause:.2f} s")
            assert pause > 0
            assert early.count("restored_records") >= done - 100
            assert early.count("restored_records") <= in_changelog(connection, 0, 1)

        # the other two tasks come back: one record of their changelogs in every turn, and from the second on only once
        # the tasks that stayed have run; were they held up, the restoration would go on without them after a while
        monkeypatch.setattr(attach, "SLICE_SECONDS", 0.0)
        monkeypatch.setattr(copies, "_BATCH", 1)
        ran: list[tuple[int, int]] = []
        monkeypatch.setattr(Pile, "watch", lambda _, task: ran.append((task, late.count("restored_records"))))
        read_slice, patience = copies.Copies.read, time.monotonic() + 60

        def in_turns(self: copies.Copies, seconds: float, *, wait: bool) -> None:
            began = late.count("restored_records") > 0
            if not began or {2, 3} <= {task for task, seen in ran if seen} or time.monotonic() > patience:
                read_slice(self, seconds, wait=wait)

        monkeypatch.setattr(copies.Copies, "read", in_turns)
        while late.count("tasks_restored") < PARTITIONS + 2:
            feed(connection, range(done, done + 10), 0.002, partitions=(2, 3))
            done += 10
        read = late.count("restored_records")
        assert 0 < read <= in_changelog(connection, 0, 1)
        meanwhile = [task for task, seen in ran if 0 < seen < read]
        assert {2, 3} <= set(meanwhile), "ready tasks ran while others restored"
        feed(connection, range(done, done + 100))
        check_chain(wait_for_chain(connection, done + 100), range(done + 100))


def test_a_followed_task_is_taken_over_without_being_read_again(bootstrap: str) -> None:
    run = make_run(bootstrap, QUICK, standby=["assemble"])
    connection = run[1]
    late, early = Member(run, "b"), Member(run, "a")
    with late.running():
        with early.running():
            until(lambda: early.count("tasks_restored") >= 2 and late.count("tasks_restored") >= 2)
            feed(connection, range(RECORDS))
            check_chain(wait_for_chain(connection, RECORDS), range(RECORDS))
            quiet(connection)
            held = in_changelog(connection, *range(PARTITIONS))
            until(lambda: early.count("followed_records") + late.count("followed_records") >= 0.9 * held)
            before = late.count("restored_records")
            tasks = late.count("tasks_restored")
        until(lambda: late.count("tasks_restored") == tasks + 2)
        feed(connection, range(RECORDS, RECORDS + 100))
        check_chain(wait_for_chain(connection, RECORDS + 100), range(RECORDS + 100))
        assert late.count("restored_records") - before < held / 10


def test_state_in_files_moves_restarts_and_leaves_nothing(bootstrap: str, tmp_path: Path) -> None:
    run = make_run(bootstrap, QUICK, on_disk=["assemble"], folder=str(tmp_path))
    connection = run[1]
    orphan = tmp_path / "assemble.a" / "state-0-of-a-killed-process.sqlite"
    orphan.parent.mkdir()
    orphan.write_bytes(b"left")
    done = 0
    for _ in range(2):
        member = Member(run, "a")
        with member.running():
            until(lambda: member.count("tasks_restored") == PARTITIONS)  # noqa: B023
            assert len(list(orphan.parent.glob("state-*.sqlite"))) == PARTITIONS
            assert not orphan.exists()
            feed(connection, range(done, done + 100))
            done += 100
            check_chain(wait_for_chain(connection, done), range(done))
        assert not orphan.parent.exists()
    assert member.count("restored_records") > 100
