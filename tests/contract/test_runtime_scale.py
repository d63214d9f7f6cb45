"""Operator workers come and go under load, from one to three and back: nothing lost or repeated, and short pauses.

The pause of a rebalance is the longest silence of any task around it; it is printed, and stated in docs/operators.md.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from toy_worker import PARTITIONS, Chain, check_chain, feed, make_run, running, wait_for_chain

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.pipeline.runtime.metrics import Registry
from headrace.pipeline.runtime.worker import Worker
from headrace.schemas.config import RunConfig
from headrace.schemas.records import Failed


class Member:
    """A worker that is started and stopped."""

    def __init__(self, run: tuple[RunConfig, Connection], instance: str) -> None:
        config, connection = run
        self.stop, self.metrics = StopSignal(), Registry()
        worker = Worker(connection, config, "assemble", instance, Chain, stop=self.stop, metrics=self.metrics)
        self._context = running(worker, self.stop)

    def __enter__(self) -> Member:
        self.errors = self._context.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.stop.is_set():
            self.stop.set("test")
        self._context.__exit__(None, None, None)

    def tasks(self) -> float:
        """Tasks that this member ever started."""
        names = ("tasks_restored_total", "tasks_resumed_total")
        return sum(self.metrics.value(name, stage="assemble") for name in names)


@contextmanager
def load(connection: Connection) -> Iterator[list[int]]:
    """Records in at some hundred a second; the list's last entry is how many there were."""
    stop, fed = threading.Event(), [0]

    def run() -> None:
        while not stop.is_set():
            feed(connection, range(fed[0], fed[0] + 50), 0.004)
            fed[0] += 50

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield fed
    finally:
        stop.set()
        thread.join()


def until(what: object, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def pauses(connection: Connection, events: list[tuple[str, int]]) -> dict[str, int]:
    """Longest silence in ms of any task's output, by the event that it falls into."""
    written: dict[int, list[int]] = defaultdict(list)
    for raw in connection.read_topic("groups"):
        record = raw.decoded()
        assert isinstance(record, Failed)
        written[record.attempts].append(raw.timestamp_ms)
    assert len(written) == PARTITIONS
    out = {}
    ends = [at for _, at in events[1:]] + [2**62]
    for (name, begin), end in zip(events, ends, strict=True):
        gaps = [
            later - earlier
            for times in written.values()
            for earlier, later in itertools.pairwise(sorted(times))
            if begin <= later and earlier <= end
        ]
        out[name] = max(gaps)
    return out


def test_workers_grow_from_one_to_three_and_shrink_under_load(bootstrap: str) -> None:
    run = make_run(bootstrap)
    connection = run[1]
    events: list[tuple[str, int]] = []

    def event(name: str) -> None:
        events.append((name, time.time_ns() // 1_000_000))

    with Member(run, "c") as first, load(connection) as fed:
        until(lambda: first.tasks() == PARTITIONS)
        wait_for_chain(connection, 100)
        event("1 to 2")
        with Member(run, "b") as second:
            until(lambda: second.tasks() >= 2)
            time.sleep(0.5)
            event("2 to 3")
            with Member(run, "a") as third:
                until(lambda: third.tasks() >= 1)
                time.sleep(0.5)
                event("3 to 2")
                before = first.tasks()
                third.stop.set("scale in")
                until(lambda: first.tasks() > before)
                time.sleep(0.5)
            event("2 to 1")
            before = first.tasks()
            second.stop.set("scale in")
            until(lambda: first.tasks() > before)
            time.sleep(0.5)
        assert not second.errors
        assert not third.errors
    numbers = range(fed[-1])
    again = Member(run, "c")
    with again:
        check_chain(wait_for_chain(connection, len(numbers)), numbers)
    assert not first.errors
    print("longest silence of a task, ms:", pauses(connection, events))
