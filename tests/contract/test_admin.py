"""What administrators and tools ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from kafka_kit import Kit, unique, wait_until


def _refused(call: Callable[[], Any]) -> str:
    """The name of the error that a call ends with."""
    with pytest.raises(KafkaException) as caught:
        call()
    return str(caught.value.args[0].name())


def test_topics_are_created_once_and_deleted(kit: Kit) -> None:
    topic = kit.topic(partitions=7)
    create = [NewTopic(topic, 1, 1)]
    assert _refused(lambda: kit.admin.create_topics(create)[topic].result(10)) == "TOPIC_ALREADY_EXISTS"
    kit.send(topic, [b"old"])
    kit.admin.delete_topics([topic])[topic].result(10)
    wait_until(lambda: topic not in kit.admin.list_topics(timeout=10).topics)
    assert _refused(lambda: kit.admin.delete_topics([topic])[topic].result(10)) == "UNKNOWN_TOPIC_OR_PART"
    wait_until(lambda: kit.admin.create_topics(create)[topic].result(10) is None)
    wait_until(lambda: kit.admin.list_topics(topic, timeout=10).topics[topic].partitions)
    assert kit.values(topic) == []


@pytest.mark.parametrize(
    ("name", "partitions", "replication", "config", "error"),
    [
        ("bad name", 1, 1, {}, "TOPIC_EXCEPTION"),
        ("x" * 250, 1, 1, {}, "TOPIC_EXCEPTION"),
        ("", 1, 3, {}, "INVALID_REPLICATION_FACTOR"),
        ("", 1, 1, {"no.such.setting": "1"}, "INVALID_CONFIG"),
        ("", 1, 1, {"retention.ms": "soon"}, "INVALID_CONFIG"),
        ("", 1, 1, {"cleanup.policy": "burn"}, "INVALID_CONFIG"),
    ],
)
def test_impossible_topics_are_refused(
    kit: Kit, name: str, partitions: int, replication: int, config: dict[str, str], error: str
) -> None:
    name = name or unique("topic")
    asked = NewTopic(name, partitions, replication, config=config)
    assert _refused(lambda: kit.admin.create_topics([asked])[name].result(10)) == error
    assert name not in kit.admin.list_topics(timeout=10).topics


def test_partitions_grow_and_never_shrink(kit: Kit) -> None:
    topic = kit.topic(partitions=2)
    kit.send(topic, [b"a"])
    kit.admin.create_partitions([NewPartitions(topic, 5)])[topic].result(10)
    wait_until(lambda: len(kit.admin.list_topics(topic, timeout=10).topics[topic].partitions) == 5)
    assert kit.values(topic, 5) == [b"a"]
    shrink = [NewPartitions(topic, 3)]
    assert _refused(lambda: kit.admin.create_partitions(shrink)[topic].result(10)) == "INVALID_PARTITIONS"


def test_settings_are_shown_and_changed(kit: Kit) -> None:
    topic = kit.topic(retention_ms=3_600_000)
    before = kit.config(topic)
    assert (before["retention.ms"], before["cleanup.policy"], before["max.message.bytes"]) == (
        "3600000",
        "delete",
        "1048588",
    )

    def change(name: str, operation: AlterConfigOpType, value: str | None) -> None:
        entry = ConfigEntry(name, value, incremental_operation=operation)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        kit.admin.incremental_alter_configs([resource])[resource].result(10)

    change("retention.ms", AlterConfigOpType.SET, "7200000")
    change("cleanup.policy", AlterConfigOpType.APPEND, "compact")
    wait_until(lambda: kit.config(topic)["retention.ms"] == "7200000")
    wait_until(lambda: set(kit.config(topic)["cleanup.policy"].split(",")) == {"delete", "compact"})
    change("retention.ms", AlterConfigOpType.DELETE, None)
    wait_until(lambda: kit.config(topic)["retention.ms"] == "604800000")
    assert _refused(lambda: change("segment.ms", AlterConfigOpType.SET, "-4")) == "INVALID_CONFIG"


def test_a_changed_limit_counts_at_once(kit: Kit) -> None:
    topic = kit.topic(max_message_bytes=2000)
    assert kit.send(topic, [b"x" * 5000]) == ["MSG_SIZE_TOO_LARGE"]
    entry = ConfigEntry("max.message.bytes", "10000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    kit.admin.incremental_alter_configs([resource])[resource].result(10)
    wait_until(lambda: kit.send(topic, [b"x" * 5000]) == [])


def test_settings_of_a_topic_that_is_not_there(kit: Kit) -> None:
    resource = ConfigResource(ResourceType.TOPIC, unique("nowhere"))
    error = _refused(lambda: kit.admin.describe_configs([resource])[resource].result(10))
    assert error == "UNKNOWN_TOPIC_OR_PART"


def test_offsets_of_a_partition(kit: Kit) -> None:
    topic = kit.topic()
    kit.send(topic, [b"%d" % i for i in range(10)], timestamp=1_700_000_000_000)

    def at(spec: OffsetSpec) -> int:
        position = TopicPartition(topic, 0)
        listed = kit.admin.list_offsets({position: spec}, isolation_level=IsolationLevel.READ_UNCOMMITTED)
        return int(listed[position].result(10).offset)

    assert [at(OffsetSpec.earliest()), at(OffsetSpec.latest())] == [0, 10]
    assert at(OffsetSpec.for_timestamp(1_700_000_000_000)) == 0


def test_records_are_deleted_from_the_front(kit: Kit) -> None:
    topic = kit.topic()
    kit.send(topic, [b"%d" % i for i in range(100)])

    def delete(offset: int) -> int:
        position = TopicPartition(topic, 0, offset)
        return int(kit.admin.delete_records([position])[position].result(10).low_watermark)

    assert delete(40) == 40
    assert kit.watermarks(topic) == (40, 100)
    assert kit.values(topic)[0] == b"40"
    assert delete(20) == 40
    assert _refused(lambda: delete(200)) == "OFFSET_OUT_OF_RANGE"
    assert delete(-1) == 100
    assert kit.values(topic) == []
    kit.send(topic, [b"next"])
    assert [(m.offset(), m.value()) for m in kit.read(topic)] == [(100, b"next")]


def test_records_of_a_compacted_topic_cannot_be_deleted(kit: Kit) -> None:
    topic = kit.topic(cleanup_policy="compact")
    kit.send(topic, [b"v"], [b"k"])
    position = TopicPartition(topic, 0, 1)
    assert _refused(lambda: kit.admin.delete_records([position])[position].result(10)) == "POLICY_VIOLATION"


def test_groups_are_listed_described_and_deleted(kit: Kit) -> None:
    topic, group = kit.topic(), unique("group")
    consumer = kit.consumer(group)
    consumer.subscribe([topic])
    wait_until(lambda: consumer.poll(0.1) is None and consumer.assignment())

    def described() -> Any:
        return kit.admin.describe_consumer_groups([group])[group].result(10)

    assert group in [listed.group_id for listed in kit.admin.list_consumer_groups().result(10).valid]
    state = wait_until(lambda: described() if described().state.name == "STABLE" else None)
    assert [len(member.assignment.topic_partitions) for member in state.members] == [1]
    assert _refused(lambda: kit.admin.delete_consumer_groups([group])[group].result(10)) == "NON_EMPTY_GROUP"
    consumer.commit(offsets=[TopicPartition(topic, 0, 3)], asynchronous=False)
    kit.close()
    wait_until(lambda: described().state.name == "EMPTY")
    kit.admin.delete_consumer_groups([group])[group].result(10)
    assert _refused(lambda: kit.admin.delete_consumer_groups([group])[group].result(10)) == "GROUP_ID_NOT_FOUND"
    assert kit.committed(group, topic) < 0


def test_offsets_of_a_group_are_listed_and_altered(kit: Kit) -> None:
    topic, group = kit.topic(), unique("group")
    kit.consumer(group).commit(offsets=[TopicPartition(topic, 0, 60, metadata="note")], asynchronous=False)
    entry = kit.consumer(group).committed([TopicPartition(topic, 0)], timeout=10)[0]
    assert (entry.offset, entry.metadata) == (60, "note")

    def listed() -> list[int]:
        asked = [ConsumerGroupTopicPartitions(group)]
        found = kit.admin.list_consumer_group_offsets(asked)[group].result(10)
        return [position.offset for position in found.topic_partitions]

    assert listed() == [60]
    change = [ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 77)])]
    kit.admin.alter_consumer_group_offsets(change)[group].result(10)
    assert listed() == [77]
