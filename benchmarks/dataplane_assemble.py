"""The assemble worker and the bare transactional loop over the same trajectories.

In: a run whose topics are filled; out: seconds from the first record to the last commit, and CPU seconds in between.
The bare loop is what the runtime is held against: group by key, seven members to a changelog, eight to the output,
eight tombstones, offsets and commit every 500 ms, nothing decoded, checked, timed or deduplicated.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewTopic

from benchmarks.dataplane_clock import Clock, Cost
from benchmarks.dataplane_feed import GROUP, PARTITIONS
from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.pipeline.runtime.stage import Context, Received, Stage
from headrace.pipeline.runtime.worker import Worker
from headrace.pipeline.trajectory_to_group import Assemble
from headrace.schemas.config import RunConfig
from headrace.schemas.records import Kept

SECONDS = 300
BARE_COMMIT_SECONDS = 0.5
BARE_COMMIT_BYTES = 64 << 20


def ours(config: RunConfig, connection: Connection, groups: int) -> Cost:
    """The real worker with the real stage, until every group's Kept is committed."""
    clock, stop = Clock(), StopSignal()

    class Timed(Assemble):
        """Tells when the first trajectory comes in."""

        def process(self, received: Received, context: Context) -> None:
            if received.topic == "trajectories":
                clock.start()
            super().process(received, context)

    def factory(config: RunConfig, partition: int) -> Stage:
        return Timed(config, partition)

    worker = Worker(connection, config, "assemble", "dataplane", factory, stop=stop)
    thread = threading.Thread(target=worker.run)
    thread.start()
    watcher = connection.consumer("watcher", fetch_wait_max_ms=50)
    watcher.assign([TopicPartition(connection.topic("ledger"), 0, 0)])
    kept, end = 0, time.monotonic() + SECONDS
    while kept < groups and time.monotonic() < end and thread.is_alive():
        message = watcher.poll(0.1)
        if message is not None and message.error() is None:
            kept += dict(message.headers() or []).get("hr-record") == Kept.__name__.encode()  # type: ignore[arg-type]
    cost = clock.cost(groups * GROUP)
    stop.set("measured")
    thread.join()
    watcher.close()
    if kept < groups:
        raise RuntimeError(f"{kept} of {groups} groups were kept within {SECONDS} s")
    return cost


def bare(config: RunConfig, connection: Connection, groups: int) -> Cost:
    """The loop without a framework, over the same input topic."""
    app = f"{config.run.id}.bare"
    changelog, output = f"{app}-changelog", f"{app}-output"
    topics = [
        NewTopic(changelog, PARTITIONS, 1, config={"cleanup.policy": "compact", "max.message.bytes": "8000000"}),
        NewTopic(output, PARTITIONS, 1, config={"max.message.bytes": "8000000"}),
    ]
    for future in connection.admin().create_topics(topics).values():
        future.result(30)
    consumer = connection.consumer("bare", app, auto_offset_reset="earliest", queued_max_messages_kbytes=65536)
    producer = connection.producer("bare", app, linger_ms=5)
    producer.init_transactions(30)
    consumer.subscribe([connection.topic("trajectories")])
    held: dict[bytes, list[bytes]] = defaultdict(list)
    positions: dict[int, int] = {}
    clock, taken, began, size = Clock(), 0, 0.0, 0
    is_open = False
    total = groups * GROUP
    deadline = time.monotonic() + SECONDS
    while (taken < total or is_open) and time.monotonic() < deadline:
        message: Any = consumer.poll(0.002)
        if message is not None and message.error() is None:
            clock.start()
            if not is_open:
                producer.begin_transaction()
                is_open, began, size = True, time.monotonic(), 0
            key, value, partition = message.key(), message.value(), message.partition()
            positions[partition] = message.offset() + 1
            taken, size = taken + 1, size + len(value)
            members = held[key]
            if len(members) < GROUP - 1:
                producer.produce(changelog, value, key=key + bytes([len(members)]), partition=partition)
                members.append(value)
            else:
                for number, member in enumerate(members):
                    producer.produce(output, member, key=key)
                    producer.produce(changelog, None, key=key + bytes([number]), partition=partition)
                producer.produce(output, value, key=key)
                del held[key]
            if taken % 100 == 0:
                producer.poll(0)
        old = time.monotonic() - began > BARE_COMMIT_SECONDS or size > BARE_COMMIT_BYTES
        if is_open and (old or message is None or taken == total):
            offsets = [TopicPartition(connection.topic("trajectories"), p, o) for p, o in positions.items()]
            producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata())
            producer.commit_transaction()
            is_open = False
    cost = clock.cost(total)
    consumer.close()
    if taken < total:
        raise RuntimeError(f"the bare loop read {taken} of {total} records within {SECONDS} s")
    for future in connection.admin().delete_topics([changelog, output]).values():
        future.result(30)
    return cost
