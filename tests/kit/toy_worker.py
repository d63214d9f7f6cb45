"""A toy stage whose output shows every fault of a runtime, and a program that runs it: what is folded twice, lost or
half done breaks the chain of numbers that it writes.

``python toy_worker.py BOOTSTRAP RUN INSTANCE [SECONDS]`` runs it on ``assemble`` until it is killed.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal, exit_with
from headrace.pipeline.runtime.stage import Context, Received
from headrace.pipeline.runtime.worker import Worker
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import KafkaConfig, RunConfig
from headrace.schemas.records import Failed, Record
from headrace.schemas.topics import partition_counts

PARTITIONS = 4


def toy_config(run: str, settings: dict[str, str] | None = None, **runtime: object) -> RunConfig:
    """A run of one policy; ``runtime`` are keys of ``[runtime]``."""
    return RunConfig.model_validate(
        {
            "run": {"id": run, "group_partitions": PARTITIONS, "inboxes": 4, "lanes": 2},
            "kafka": KafkaConfig(settings=settings or {}),
            "runtime": {"standby": [], **runtime},
            "policies": {"main": {"model": "none"}},
            "streams": {"main": {"dataset": "none"}},
        }
    )


def make_run(bootstrap: str, settings: dict[str, str] | None = None, **runtime: object) -> tuple[RunConfig, Connection]:
    """A new run with its topics."""
    config = toy_config(f"toy-{uuid.uuid4().hex[:8]}", settings, **runtime)
    connection = Connection.of(config.kafka, config.run.id, bootstrap)
    connection.wait_for_broker(30)
    connection.ensure_topics(partition_counts(["main"], groups=PARTITIONS, inboxes=4, lanes=2))
    return config, connection


def toy(number: int, reason: str = "") -> Failed:
    """An input or output record with a number."""
    return Failed(kind="train", group=number, replica=0, attempts=0, lost_leases=0, reason=reason)


class Chain:
    """Counts the records of its task in its store and writes each with its number: group, count, task, offset.

    A record whose reason is ``boom`` raises after it wrote and emitted; ``timer:MS`` arms a timer at that time.
    """

    def __init__(self, config: RunConfig, partition: int) -> None:
        self.partition = partition
        self.count = 0

    def open(self, context: Context) -> None:
        self.count = int(context.store().get(b"count") or b"0")

    def process(self, received: Received, context: Context) -> None:
        record = received.record
        assert isinstance(record, Failed)
        self.count += 1
        context.store().put(b"count", str(self.count).encode())
        self._emit(received, context)
        if record.reason == "boom":
            raise ValueError("boom")
        if record.reason.startswith("timer:"):
            context.schedule(f"timer-{record.group}", int(record.reason.removeprefix("timer:")))

    def on_timer(self, key: str, at_ms: int, context: Context) -> None:
        context.emit("ledger", toy(int(key.removeprefix("timer-")), f"{at_ms} {self.count}"), partition=0)

    def act(self, context: Context) -> None:
        pass

    def finished(self) -> bool:
        return False

    def _emit(self, received: Received, context: Context) -> None:
        assert isinstance(received.record, Failed)
        record = Failed(
            kind="train",
            group=received.record.group,
            replica=self.count,
            attempts=self.partition,
            lost_leases=received.offset,
        )
        context.emit("groups", record, partition=0)


class Pile(Chain):
    """Keeps every record under a key of its own, so that its changelog has an entry for each."""

    watch: Callable[[int], None] = staticmethod(lambda _task: None)
    """Told the task of every record."""

    def process(self, received: Received, context: Context) -> None:
        super().process(received, context)
        context.store().put(b"record %d" % received.offset, bytes(200))
        self.watch(self.partition)


def send(connection: Connection, topic: str, records: list[tuple[int, Record | bytes]]) -> None:
    """Write records (partition, record or raw bytes) and wait until they are acknowledged."""
    producer = connection.producer("feed", linger_ms=0)
    for partition, record in records:
        raw = isinstance(record, bytes)
        headers = [] if raw else headers_of(record, connection.run, "0")
        connection.produce(producer, topic, record if raw else encode(record), partition=partition, headers=headers)
    assert producer.flush(60) == 0


def feed(connection: Connection, numbers: range, pause: float = 0.0, partitions: tuple[int, ...] = ()) -> None:
    """Write toy records over all partitions of ``admissions``, or over some."""
    places = partitions or tuple(range(PARTITIONS))
    producer = connection.producer("feed", linger_ms=0)
    for n in numbers:
        record = toy(n)
        connection.produce(
            producer,
            "admissions",
            encode(record),
            partition=places[n % len(places)],
            headers=headers_of(record, connection.run, "0"),
        )
        if pause:
            producer.poll(0)
            time.sleep(pause)
    assert producer.flush(120) == 0


def chain_of(connection: Connection) -> list[Failed]:
    """What the toy stage wrote."""
    return [r for raw in connection.read_topic("groups") if isinstance(r := raw.decoded(), Failed)]


def wait_for_chain(connection: Connection, count: int, seconds: float = 60) -> list[Failed]:
    """The toy's output once it has ``count`` records or time is up."""
    end = time.monotonic() + seconds
    while True:
        out = chain_of(connection)
        if len({r.group for r in out}) >= count or time.monotonic() > end:
            return out
        time.sleep(0.2)


def check_chain(out: list[Failed], numbers: range) -> None:
    """Every input offset once, every number, and in every task an unbroken count from 1: nothing lost or half done.

    A number may come twice in the input: a producer without transactions may repeat itself over a broker's death.
    """
    places = [(r.attempts, r.lost_leases) for r in out]
    assert len(places) == len(set(places)), "records were folded twice"
    groups = {r.group for r in out}
    assert groups == set(numbers), f"{len(set(numbers) - groups)} records are missing"
    counts: dict[int, list[int]] = defaultdict(list)
    for record in out:
        counts[record.attempts].append(record.replica)
    for task, seen in counts.items():
        assert seen == list(range(1, len(seen) + 1)), f"the state of task {task} does not fit its output"


@contextmanager
def running(worker: Worker, stop: StopSignal) -> Iterator[list[BaseException]]:
    """Run a worker in a thread; the list holds what it raised."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            worker.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield errors
    finally:
        stop.set("test")
        thread.join(60)
        assert not thread.is_alive()


def main() -> None:
    bootstrap, run, instance = sys.argv[1:4]
    settings = dict(s.split("=", 1) for s in sys.argv[4:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = toy_config(run, settings)
    connection = Connection.of(config.kafka, run, bootstrap)
    Worker(connection, config, "assemble", instance, Chain, stop=StopSignal().listen(with_parent=False)).run()


if __name__ == "__main__":
    sys.exit(exit_with(main))
