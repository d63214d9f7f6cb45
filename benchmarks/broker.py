"""Throughput of the local broker: produce and consume at 1 KB, 100 KB and 1 MB, alone or against another broker.

`python -m benchmarks.broker [--quick] [--json FILE] [--against COMMAND]`; COMMAND starts the other broker in the
foreground, with {port} and {data} replaced. Both brokers are measured in turns in the same run by one producer and one
consumer (librdkafka) on a topic with four partitions; figures are medians, in MB (1e6 bytes) per second of payload.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.form import Figure, main, median
from headrace.connectors.kafka_node import free_port

SIZES = {"1k": (1_000, 150_000_000), "100k": (100_000, 500_000_000), "1m": (1_000_000, 500_000_000)}
"""Message bytes and total bytes of each measurement."""
PARTITIONS = 4
PRODUCE_TARGET, CONSUME_TARGET = 1.0, 0.4


@contextmanager
def started(command: str) -> Iterator[str]:
    """Run a broker and give its address; it has a process group of its own, which is ended afterwards."""
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        words = [word.format(port=port, data=data) for word in shlex.split(command)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            yield _ready(f"127.0.0.1:{port}", process)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _ready(bootstrap: str, process: subprocess.Popen[bytes]) -> str:
    client = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for _ in range(300):
        if process.poll() is not None:
            raise SystemExit(f"the broker ended with status {process.returncode}")
        try:
            client.list_topics(timeout=1)
            return bootstrap
        except KafkaException:
            time.sleep(0.1)
    raise SystemExit(f"no broker answers on {bootstrap}")


def produce(bootstrap: str, topic: str, size: int, total: int) -> float:
    """Send `total` bytes in messages of `size`, acks=all; returns MB/s until the last acknowledgement."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    topics = [NewTopic(topic, PARTITIONS, 1, config={"max.message.bytes": "10485760"})]
    admin.create_topics(topics)[topic].result(20)
    failed: list[str] = []

    def delivered(error: object, _: Message) -> None:
        if error is not None:
            failed.append(str(error))

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "linger.ms": 5,
            "message.max.bytes": 10_485_760,
            "queue.buffering.max.kbytes": 262_144,
            "queue.buffering.max.messages": 500_000,
        }
    )
    payload = os.urandom(size)
    count = total // size
    producer.list_topics(topic, timeout=10)
    start = time.perf_counter()
    for number in range(count):
        while True:
            try:
                producer.produce(topic, payload, partition=number % PARTITIONS, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.05)
        if number % 100 == 0:
            producer.poll(0)
    producer.flush(120)
    seconds = time.perf_counter() - start
    if failed:
        raise SystemExit(f"{len(failed)} messages failed: {failed[0]}")
    return count * size / seconds / 1e6


def consume(bootstrap: str, topic: str, size: int, total: int) -> float:
    """Read the topic from the start; returns MB/s from the first message to the last."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": uuid.uuid4().hex,
            "enable.auto.commit": False,
            "fetch.message.max.bytes": 8 << 20,
            "fetch.max.bytes": 64 << 20,
            "receive.message.max.bytes": 128 << 20,
            "queued.max.messages.kbytes": 262_144,
            "fetch.queue.backoff.ms": 10,
        }
    )
    count = total // size
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
    got = len(consumer.consume(1, 20))
    start = time.perf_counter()
    while got < count:
        messages = consumer.consume(min(1000, count - got), 10)
        if not messages:
            raise SystemExit(f"{got} of {count} messages came")
        got += sum(1 for message in messages if message.error() is None)
    seconds = time.perf_counter() - start
    consumer.close()
    return count * size / seconds / 1e6


def measure(given: argparse.Namespace) -> list[Figure]:
    """All sizes on one or two brokers in turns."""
    rounds = 2 if given.quick else 4
    share = 4 if given.quick else 1
    local = f"{sys.executable} -m headrace.connectors.broker --data {{data}} --port {{port}}"
    if given.against is None:
        with started(local) as bootstrap:
            return _figures(_rounds({"local": bootstrap}, rounds, share))
    with started(local) as bootstrap, started(given.against) as other:
        return _figures(_rounds({"local": bootstrap, "against": other}, rounds, share))


Speeds = dict[tuple[str, str, str], list[float]]
"""MB/s by (broker, produce or consume, size)."""


def _rounds(brokers: dict[str, str], rounds: int, share: int) -> Speeds:
    speeds: Speeds = {}
    for number in range(rounds + 1):
        for label, (size, total) in SIZES.items():
            for broker, bootstrap in brokers.items():
                topic = f"bench-{label}-{uuid.uuid4().hex[:8]}"
                written = produce(bootstrap, topic, size, total // share)
                read = consume(bootstrap, topic, size, total // share)
                admin = AdminClient({"bootstrap.servers": bootstrap})
                admin.delete_topics([topic])[topic].result(20)
                if number == 0:
                    continue
                speeds.setdefault((broker, "produce", label), []).append(written)
                speeds.setdefault((broker, "consume", label), []).append(read)
    return speeds


def _figures(speeds: Speeds) -> list[Figure]:
    figures = []
    for label in SIZES:
        for action, target in (("produce", PRODUCE_TARGET), ("consume", CONSUME_TARGET)):
            mine = median(speeds["local", action, label])
            figures.append(Figure(f"{action}_{label}_mb_s", mine, "MB/s"))
            if ("against", action, label) in speeds:
                other = median(speeds["against", action, label])
                figures.append(Figure(f"{action}_{label}_against_mb_s", other, "MB/s"))
                ratio = mine / other
                figures.append(Figure(f"{action}_ratio_{label}", ratio, "x", target, anchor="the other broker"))
    return figures


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", metavar="COMMAND", help="starts another broker; {port} and {data} are replaced")


if __name__ == "__main__":
    main(__doc__, measure, _options)
