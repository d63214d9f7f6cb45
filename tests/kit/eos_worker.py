"""A process that copies a topic exactly once: reads, writes and commits offsets in transactions until it is killed.

Usage: eos_worker.py BOOTSTRAP SOURCE SINK GROUP NAME. One name is one instance: a new process of it fences the old one.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from confluent_kafka import Consumer, KafkaException, Producer

_BATCH_SECONDS = 0.05
_LONGEST_TRANSACTION = 8
"""Seconds until the alarm ends the process: librdkafka's send_offsets can wait for ever after a broker's restart."""


def main() -> None:
    """Copy until killed; a fatal error of the producer ends the process with status 1."""
    bootstrap, source, sink, group, name = sys.argv[1:]
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.instance.id": name,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 500,
            "log_level": 0,
        }
    )
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": f"{group}.{name}",
            "transaction.timeout.ms": 10_000,
            "linger.ms": 0,
            "log_level": 0,
        }
    )
    try:
        producer.init_transactions(30)
        consumer.subscribe([source], on_revoke=lambda *_: os._exit(0))
        while True:
            copy_some(consumer, producer, sink)
    except KafkaException as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


def copy_some(consumer: Consumer, producer: Producer, sink: str) -> None:
    """One transaction over what came within a short while."""
    first = consumer.poll(0.5)
    if first is None:
        return
    if first.error() is not None:
        if first.error().fatal():
            raise KafkaException(first.error())
        return
    messages = [first]
    until = time.monotonic() + _BATCH_SECONDS
    while time.monotonic() < until:
        message = consumer.poll(0.005)
        if message is not None and message.error() is None:
            messages.append(message)
    signal.alarm(_LONGEST_TRANSACTION)
    producer.begin_transaction()
    for message in messages:
        producer.produce(sink, message.value(), message.key(), message.partition())
    positions = consumer.position(consumer.assignment())
    producer.send_offsets_to_transaction(
        [position for position in positions if position.offset >= 0], consumer.consumer_group_metadata(), 30
    )
    producer.commit_transaction(30)
    signal.alarm(0)


if __name__ == "__main__":
    main()
