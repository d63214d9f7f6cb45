"""Single measurements of the data plane: dispatch decisions, samples in and out, restore, the way through two stages.

In: a broker; out: one number each. Stages and runtime are the real ones; what stands around them (workers that announce
room, a trainer that steps) is played by records.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import TopicPartition

from benchmarks.dataplane_clock import cpu_seconds
from benchmarks.dataplane_feed import GROUP, Feed, make_opened, make_sequence, make_trajectory, new_run
from headrace.connectors.kafka import Connection, RawRecord
from headrace.connectors.lifetime import StopSignal
from headrace.pipeline.runtime.__main__ import run_stages
from headrace.schemas.codec import decode, encode
from headrace.schemas.config import RunConfig
from headrace.schemas.ids import changelog_topic, inbox_of
from headrace.schemas.parts import HostedPolicy
from headrace.schemas.records import Demand, Manifest, Prompt, Step
from headrace.schemas.topics import CHANGELOG_SETTINGS

WAIT_SECONDS = 180.0
SAMPLE_TOKENS = 1024
WORKERS = 4


@contextmanager
def stages(config: RunConfig, connection: Connection, *names: str) -> Iterator[None]:
    """Run stages in threads of this process."""
    stop = StopSignal()
    thread = threading.Thread(target=run_stages, args=(config, connection, "dataplane", names, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set("measured")
        thread.join()


def reader(connection: Connection, topic: str, partitions: int = 1) -> Any:
    """A consumer at the start of a topic that is told of new records at once."""
    consumer = connection.consumer(f"watch.{topic}", fetch_wait_max_ms=500)
    consumer.assign([TopicPartition(connection.topic(topic), p, 0) for p in range(partitions)])
    return consumer


def decisions_per_second(bootstrap: str, tasks: int) -> float:
    """Tasks that `schedule` gives out in a second, admissions included, once workers announce room for all.

    From the announcement to the last task's time, because all of one turn's records carry the time of its end.
    """
    trainer = {"batch_groups": tasks // GROUP}
    with new_run(bootstrap, trainer=trainer) as (config, connection):
        feed = Feed(connection)
        for number in range(tasks // GROUP + 64):
            feed.put(
                "prompts",
                Prompt(
                    prompt_id=f"{number:016x}", stream="main", dataset="d", row=number, epoch=0, position=number,
                    prompt="52436=", answer="23456",
                ),
                0,
            )  # fmt: skip
        watch = reader(connection, "tasks", 4)
        with stages(config, connection, "schedule"):
            _announce(feed, 0, 1)
            if not _stamps(watch, 1, WAIT_SECONDS):  # until then it starts
                raise RuntimeError("schedule has given out no task")
            began = int(time.time() * 1000)
            for number in range(1, WORKERS):
                _announce(feed, number, tasks // WORKERS)
            # leases are lost after 10 s without Demand: what comes then is another thing
            stamps = _stamps(watch, tasks // WORKERS * (WORKERS - 1), 8.0)
        watch.close()
        if not stamps:
            raise RuntimeError("schedule has given out one task only")
        return len(stamps) / max(1e-3, (max(stamps) - began) / 1000)


def _announce(feed: Feed, number: int, capacity: int) -> None:
    """A worker has room for so many tasks."""
    name = f"rollout-{number}"
    demand = Demand(
        worker=name, incarnation=1, role="any", capacity=capacity, next_sequence=0, inbox=inbox_of(name, 4),
        sent_ms=int(time.time() * 1000), policies=[HostedPolicy(policy=0, version=0)],
    )  # fmt: skip
    feed.put("demand", demand, 0)
    feed.flush()


def _stamps(watch: Any, count: int, seconds: float) -> list[int]:
    """Times of so many records, or of those that come within the time."""
    stamps: list[int] = []
    end = time.monotonic() + seconds
    while len(stamps) < count and time.monotonic() < end:
        message = watch.poll(0.2)
        if message is not None and message.error() is None:
            stamps.append(message.timestamp()[1])
    return stamps


def put_get_cpu_ms(bootstrap: str, groups: int) -> float:
    """CPU time of this process to write a 1,024-token sample and to read it back, in groups of 8."""
    with new_run(bootstrap) as (_, connection):
        samples = [make_sequence(SAMPLE_TOKENS, seed) for seed in range(GROUP)]
        producer = connection.producer("put")
        watch = reader(connection, "trajectories")
        _put_get(connection, producer, watch, samples, 8)  # connections are made, schemas parsed
        before = cpu_seconds()
        _put_get(connection, producer, watch, samples, groups)
        spent = cpu_seconds() - before
        watch.close()
        return spent / (groups * GROUP) * 1000


def _put_get(connection: Connection, producer: Any, watch: Any, samples: list[Any], groups: int) -> None:
    for group in range(groups):
        for replica, sample in enumerate(samples):
            value = encode(make_trajectory(group, replica, sample))
            connection.produce(producer, "trajectories", value, partition=0, key=b"%d" % group)
        if producer.flush(30):
            raise RuntimeError("not acknowledged within 30 s")
        left = GROUP
        while left:
            message = watch.poll(5.0)
            if message is None:
                raise RuntimeError("a sample did not come back within 5 s")
            if message.error() is None:
                decode(message.value(), message.headers())
                left -= 1


def restore_share(bootstrap: str, churn_mb: int) -> float:
    """Bytes that a restore reads, over three times the live state and two segments, after `churn_mb` of changes."""
    keys, size = 400, 4096
    live = keys * size
    topic = changelog_topic("assemble", "state")
    with new_run(bootstrap) as (_, connection):
        producer = connection.producer("churn", f"{connection.run}.churn")
        producer.init_transactions(30)
        value = bytes(size)
        for round_ in range(churn_mb * (1 << 20) // live):
            producer.begin_transaction()
            for key in range(keys):
                producer.produce(connection.topic(topic), value[8:] + round_.to_bytes(8), b"s%d" % key, 0)
            producer.commit_transaction()
        read, bar, end = 0, 3 * live + 2 * int(CHANGELOG_SETTINGS["segment.bytes"]), time.monotonic() + 90
        while time.monotonic() < end:  # the cleaner looks every so often
            read = sum(len(raw.value or b"") + len(raw.key or b"") for raw in connection.read_topic(topic, {0: 0}))
            if read <= bar:
                break
            time.sleep(2.0)
        return read / bar


def loop_latency_ms(bootstrap: str, rounds: int) -> float:
    """Median time from the last acknowledged trajectory of a group to the readable Manifest of its batch."""
    policies = {"main": {"model": "none", "max_staleness": rounds, "mode": "drop"}}  # samples stay of version 0
    with new_run(bootstrap, trainer={"batch_groups": 1}, policies=policies) as (config, connection):
        feed, watch = Feed(connection, linger_ms=0), reader(connection, "manifests")
        took: list[float] = []
        with stages(config, connection, "assemble", "batch"):
            for group in range(rounds):
                feed.put("ledger", make_opened(group), 0)
                feed.admit(range(group, group + 1), watermark=group - 1)
                feed.flush()  # a trajectory that lies there before its group is admitted is dropped
                feed.trajectories(range(group, group + 1))
                feed.flush()
                began = time.monotonic()
                manifest = _next_manifest(watch, connection.run)
                took.append((time.monotonic() - began) * 1000)
                feed.put("steps", _step(manifest.batch), 0)
        watch.close()
        return statistics.median(took[rounds // 5 :])


def _next_manifest(watch: Any, run: str) -> Manifest:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        message = watch.poll(1.0)
        if message is not None and message.error() is None:
            record = RawRecord.of(message, run).decoded()
            if isinstance(record, Manifest):
                return record
    raise RuntimeError("no Manifest within 60 s")


def _step(batch: int) -> Step:
    return Step(
        policy=0, batch=batch, version=batch, lineage=0, updates=1, loss=0.0, tokens=0, sequences=0, wait_seconds=0.0,
        step_seconds=0.0, publish_seconds=0.0, delta_bytes=0, changed_share=0.0, finished_ms=0,
    )  # fmt: skip
