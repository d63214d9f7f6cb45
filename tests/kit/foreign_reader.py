"""A client that knows nothing of headrace: confluent-kafka's Avro deserializer with only a registry's URL."""

from __future__ import annotations

from collections import Counter

from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from headrace.connectors.kafka import Connection

NOT_RECORDS = ("dead-letters",)


def undecodable(connection: Connection, url: str) -> tuple[Counter[str], list[str]]:
    """Decode every record of every topic but changelogs: (decoded by kind of topic, what could not be)."""
    decode = AvroDeserializer(SchemaRegistryClient({"url": url}))
    counts: Counter[str] = Counter()
    wrong = []
    for topic in connection.list_run_topics():
        if topic.endswith("-changelog") or topic in NOT_RECORDS:
            continue
        context = SerializationContext(connection.topic(topic), MessageField.VALUE)
        for raw in connection.read_topic(topic):
            value = decode(raw.value, context)
            named = dict(raw.headers).get("hr-record", b"")
            if not isinstance(value, dict) or not value or not named:
                wrong.append(f"{raw.source}: {value!r}")
            counts[topic.split(".")[0]] += 1
    return counts, wrong
