"""What the runtime adds to a record: a stage that passes records of 1 KB on, and a bare loop that does the same.

In: a run whose `admissions` are filled with such records; out: costs of both, each in a process of its own. The worker
decodes, keeps positions and state in a changelog, times and counts, and could undo each call; the loop does none of it.
"""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewTopic

from benchmarks.dataplane_clock import Clock, Cost
from benchmarks.dataplane_feed import PARTITIONS, Feed
from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.pipeline.runtime.stage import Context, Received, Stage
from headrace.pipeline.runtime.worker import Worker
from headrace.schemas.config import RunConfig
from headrace.schemas.records import Failed

BYTES = 1024
SECONDS = 300
COMMIT_SECONDS = 0.5


def fill(connection: Connection, records: int) -> None:
    """Records of 1 KB over all partitions of `admissions`."""
    feed = Feed(connection)
    for number in range(records):
        record = Failed(kind="train", group=number, replica=0, attempts=0, lost_leases=0, reason="x" * BYTES)
        feed.put("admissions", record, number % PARTITIONS)
    feed.flush()


def worker_passes(config: RunConfig, connection: Connection, records: int) -> Cost:
    """The worker with a stage that emits what comes in, until all is committed."""
    clock, taken = Clock(), [0]
    cost: list[Cost] = []

    class Pass:
        """Emits every record to `groups` as the bytes that came."""

        def open(self, context: Context) -> None:
            """Nothing: there is no state."""

        def process(self, received: Received, context: Context) -> None:
            """Pass one record on."""
            clock.start()
            taken[0] += 1
            context.emit("groups", received.record, partition=0, value=received.value)

        def on_timer(self, key: str, at_ms: int, context: Context) -> None:
            """Nothing: there are no timers."""

        def act(self, context: Context) -> None:
            """Nothing to decide."""

        def finished(self) -> bool:
            """True once every task has passed on everything; asked when nothing is open, so all is committed."""
            done = taken[0] >= records
            if done and not cost:
                cost.append(clock.cost(records))
            return done

    def factory(config: RunConfig, partition: int) -> Stage:
        return Pass()

    Worker(connection, config, "assemble", "overhead", factory, stop=StopSignal()).run()
    if taken[0] != records:
        raise RuntimeError(f"{taken[0]} records were folded where there are {records}")
    return cost[0]


def loop_passes(config: RunConfig, connection: Connection, records: int) -> Cost:
    """A bare transactional loop that produces what it polls."""
    app = f"{config.run.id}.pass"
    for future in connection.admin().create_topics([NewTopic(app, 1, 1)]).values():
        future.result(30)
    consumer = connection.consumer("pass", app, auto_offset_reset="earliest")
    producer = connection.producer("pass", app)
    producer.init_transactions(30)
    consumer.subscribe([connection.topic("admissions")])
    clock, taken, began, is_open = Clock(), 0, 0.0, False
    positions: dict[int, int] = {}
    deadline = time.monotonic() + SECONDS
    while (taken < records or is_open) and time.monotonic() < deadline:
        message: Any = consumer.poll(0.002)
        if message is not None and message.error() is None:
            clock.start()
            if not is_open:
                producer.begin_transaction()
                is_open, began = True, time.monotonic()
            producer.produce(app, message.value(), key=message.key(), partition=0, headers=message.headers())
            positions[message.partition()] = message.offset() + 1
            taken += 1
            if taken % 256 == 0:
                producer.poll(0)
        if is_open and (message is None or time.monotonic() - began > COMMIT_SECONDS or taken == records):
            offsets = [TopicPartition(connection.topic("admissions"), p, o) for p, o in positions.items()]
            producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata())
            producer.commit_transaction()
            is_open = False
    cost = clock.cost(records)
    consumer.close()
    if taken < records:
        raise RuntimeError(f"the bare loop read {taken} of {records} records within {SECONDS} s")
    for future in connection.admin().delete_topics([app]).values():
        future.result(30)
    return cost
