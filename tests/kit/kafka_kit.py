"""Small tools over librdkafka for contract tests: topics, producers, consumers that are closed afterwards."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType


def unique(prefix: str) -> str:
    """A name that no other test has."""
    return f"{prefix}-{uuid.uuid4().hex[:10]}"


def wait_until(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """The first true result of `condition`; fails when it does not come in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        time.sleep(0.05)
    raise AssertionError(f"not true within {seconds} s")


class Kit:
    """Clients of one broker; keyword arguments are client settings with underscores for dots."""

    def __init__(self, bootstrap: str, kind: str) -> None:
        self.bootstrap = bootstrap
        self.kind = kind
        self.admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        self._consumers: list[Consumer] = []

    def settings(self, given: dict[str, Any], **defaults: Any) -> dict[str, Any]:
        """Client settings: `defaults`, over them `given`."""
        named = {**defaults, **given}
        return {
            "bootstrap.servers": self.bootstrap,
            "log_level": 0,
            **{name.replace("_", "."): value for name, value in named.items()},
        }

    def topic(self, partitions: int = 1, **given: Any) -> str:
        """Create a topic and wait until clients see it."""
        name = unique("topic")
        config = {key.replace("_", "."): str(value) for key, value in given.items()}
        self.admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(20)
        wait_until(lambda: len(self.admin.list_topics(name, timeout=10).topics[name].partitions) == partitions)
        return name

    def producer(self, **given: Any) -> Producer:
        """A producer that gives up after 20 s."""
        return Producer(self.settings(given, message_timeout_ms=20_000, linger_ms=0, enable_idempotence=True))

    def transactional(self, name: str | None = None, **given: Any) -> Producer:
        """A transactional producer that is ready."""
        producer = Producer(
            self.settings(given, transactional_id=name or unique("id"), transaction_timeout_ms=20_000, linger_ms=0)
        )
        producer.init_transactions(20)
        return producer

    def consumer(self, group: str | None = None, **given: Any) -> Consumer:
        """A consumer that is closed at the end of the test."""
        consumer = Consumer(
            self.settings(
                given,
                group_id=group or unique("group"),
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                fetch_wait_max_ms=100,
                session_timeout_ms=6000,
                heartbeat_interval_ms=300,
            )
        )
        self._consumers.append(consumer)
        return consumer

    def send(
        self,
        topic: str,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None = None,
        partition: int = 0,
        producer: Producer | None = None,
        **fields: Any,
    ) -> list[str]:
        """Send values and wait for them; the names of errors, empty when all arrived."""
        errors: list[str] = []

        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                errors.append(error.name())

        producer = producer or self.producer()
        for number, value in enumerate(values):
            key = keys[number] if keys is not None else None
            producer.produce(topic, value, key, partition, on_delivery=delivered, **fields)
            producer.poll(0)
        assert producer.flush(30) == 0
        return errors

    def read(self, topic: str, partitions: int = 1, start: int = OFFSET_BEGINNING, **given: Any) -> list[Message]:
        """Everything from `start` to the end (read_committed unless given), in order of arrival."""
        settings = {"isolation_level": "read_committed", **given, "enable_partition_eof": True}
        consumer = self.consumer(**settings)
        consumer.assign([TopicPartition(topic, number, start) for number in range(partitions)])
        found: list[Message] = []
        ended: set[int] = set()
        deadline = time.monotonic() + 30
        while len(ended) < partitions:
            assert time.monotonic() < deadline, f"read {len(found)} records and {len(ended)} of {partitions} ends"
            message = consumer.poll(0.5)
            if message is None:
                continue
            if message.error() is None:
                found.append(message)
            elif message.error().code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            else:
                raise AssertionError(message.error())
        return found

    def values(self, topic: str, partitions: int = 1, **given: Any) -> list[bytes | None]:
        """The values that `read` finds."""
        return [message.value() for message in self.read(topic, partitions, **given)]

    def watermarks(self, topic: str, partition: int = 0) -> tuple[int, int]:
        """(start, end) of a partition."""
        low, high = self.consumer().get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
        return low, high

    def committed(self, group: str, topic: str, partition: int = 0) -> int:
        """Committed offset of a group, negative when there is none."""
        offset: int = self.consumer(group).committed([TopicPartition(topic, partition)], timeout=10)[0].offset
        return offset

    def config(self, topic: str) -> dict[str, str]:
        """All settings of a topic."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        entries = self.admin.describe_configs([resource])[resource].result(10)
        return {name: entry.value for name, entry in entries.items()}

    def close(self) -> None:
        """Close all consumers."""
        for consumer in self._consumers:
            consumer.close()
        self._consumers.clear()
