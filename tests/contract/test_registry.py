"""A real schema registry (Apicurio): registered once by command, read by foreign clients, not needed afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apicurio import FOLDER, Apicurio
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.serialization import MessageField, SerializationContext
from foreign_reader import undecodable
from kafka_kit import unique
from tiny_run import headrace

from headrace.connectors.kafka import Connection
from headrace.connectors.registry import (
    COMPATIBILITY,
    IncompatibleSchema,
    RegistryRefused,
    RegistryUnreachable,
    SchemaRegistry,
    subject_of,
)
from headrace.connectors.schema_ids import registered_ids, take_schema_ids
from headrace.schemas.avsc import packaged_schema
from headrace.schemas.codec import encode, headers_of, to_plain
from headrace.schemas.config import KafkaConfig, RegistryConfig
from headrace.schemas.records import RECORD_TYPES, Record, RunManifest
from headrace.schemas.released import released_schemas
from headrace.schemas.topics import TOPICS, partition_counts

if not os.environ.get(FOLDER):
    pytest.skip(f"a schema registry: set {FOLDER} to a folder with Apicurio 2.6 (Java 17)", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)
SUBJECTS = {subject_of(name) for name in RECORD_TYPES}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apicurio]:
    made = Apicurio(Path(os.environ[FOLDER]), tmp_path_factory.mktemp("registry") / "log")
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def foreign(server: Apicurio) -> SchemaRegistryClient:
    """confluent-kafka's own client, which knows nothing of headrace."""
    return SchemaRegistryClient({"url": server.url})


@pytest.fixture(scope="module")
def registry(server: Apicurio) -> SchemaRegistry:
    """Ours. Asking it for ids fails and registers nothing; then the command does, as in a deployment."""
    with SchemaRegistryClient({"url": server.url}) as client:
        with pytest.raises(RegistryRefused, match=f"headrace schema register --registry {server.url}"):
            registered_ids(SchemaRegistry(RegistryConfig(url=server.url)), list(RECORD_TYPES))
        assert client.get_subjects() == [], "asking for ids registered something"
    done = headrace("schema", "register", "--registry", server.url)
    assert done.returncode == 0, done.stdout
    return SchemaRegistry(RegistryConfig(url=server.url))


def connection_of(bootstrap: str) -> Connection:
    made = Connection.of(KafkaConfig(), unique("reg"), bootstrap)
    made.wait_for_broker()
    made.ensure_topics(partition_counts(["main"], groups=1, inboxes=1, lanes=1))
    return made


def test_registering_twice_changes_nothing_and_every_subject_has_the_rule(
    registry: SchemaRegistry, foreign: SchemaRegistryClient
) -> None:
    first = {subject: foreign.get_versions(subject) for subject in foreign.get_subjects()}
    assert set(first) >= SUBJECTS
    again = headrace("schema", "register", "--registry", registry.config.url, "--format", "json")
    assert {row["state"] for row in json.loads(again.stdout.rpartition("]")[0] + "]")} == {"present"}
    assert {subject: foreign.get_versions(subject) for subject in foreign.get_subjects()} == first
    for subject in SUBJECTS:
        assert foreign.get_compatibility(subject) == COMPATIBILITY
    for name in RECORD_TYPES:
        held = foreign.get_latest_version(subject_of(name))
        assert json.loads(held.schema.schema_str) == packaged_schema(name), "words and attributes were lost"


def test_a_foreign_client_with_the_url_alone_decodes_every_record_of_every_topic(
    bootstrap: str, registry: SchemaRegistry, examples: dict[str, Record]
) -> None:
    connection = connection_of(bootstrap)
    take_schema_ids(connection, registry.config)
    producer, written = connection.producer("test"), 0
    for spec in TOPICS:
        topic = f"{spec.name}.main" if spec.per_policy else spec.name
        for name in spec.records:
            headers = headers_of(examples[name], connection.run, "0")
            connection.produce(producer, topic, encode(examples[name]), partition=0, key=b"k", headers=headers)
            written += 1
    assert producer.flush(60) == 0
    counts, wrong = undecodable(connection, registry.config.url)
    assert not wrong
    assert sum(counts.values()) == written
    assert set(counts) == {spec.name for spec in TOPICS if spec.records}
    decode = AvroDeserializer(SchemaRegistryClient({"url": registry.config.url}))
    for raw in connection.read_topic("ledger"):
        ours = raw.decoded()
        assert decode(raw.value, None) == to_plain(ours) == to_plain(examples[type(ours).__name__])


def test_what_no_tool_reads_keeps_our_own_ids(
    bootstrap: str, registry: SchemaRegistry, examples: dict[str, Record]
) -> None:
    """A changelog is read back without headers, a dead letter is the original."""
    connection = connection_of(bootstrap)
    take_schema_ids(connection, registry.config)
    value = encode(examples["Member"])
    producer = connection.producer("test")
    for topic in ("dead-letters", "batch-state-changelog"):
        connection.produce(producer, topic, value, partition=0, key=b"k")
    assert producer.flush(60) == 0
    for topic in ("dead-letters", "batch-state-changelog"):
        assert [raw.value for raw in connection.read_topic(topic)] == [value]


def test_a_run_goes_on_without_the_registry_and_a_new_one_says_what_to_do(
    bootstrap: str, registry: SchemaRegistry, examples: dict[str, Record]
) -> None:
    """The manifest of the run keeps the ids."""
    connection = connection_of(bootstrap)
    take_schema_ids(connection, registry.config)
    manifest = RunManifest(
        run=connection.run, created_ms=1, tokenizer_digest="", policies=["main"], schema_ids=dict(connection.schema_ids)
    )
    producer = connection.producer("launcher")
    headers = headers_of(manifest, connection.run, "0")
    connection.produce(producer, "run", encode(manifest), partition=0, key=b"manifest", headers=headers)
    assert producer.flush(60) == 0
    gone = RegistryConfig(url="http://127.0.0.1:1")
    part = Connection.of(KafkaConfig(), connection.run, bootstrap)
    take_schema_ids(part, gone)
    assert part.schema_ids == connection.schema_ids and len(part.schema_ids) == len(RECORD_TYPES)
    with pytest.raises(RegistryUnreachable, match=r"127\.0\.0\.1:1.*refused.*start it, correct registry\.url, or go"):
        take_schema_ids(connection_of(bootstrap), gone)


def test_what_a_foreign_client_writes_by_the_registry_is_understood(
    bootstrap: str, registry: SchemaRegistry, foreign: SchemaRegistryClient, examples: dict[str, Record]
) -> None:
    """No header of ours on it, only the registry's id."""
    connection = connection_of(bootstrap)
    take_schema_ids(connection, registry.config)
    serializer = AvroSerializer(
        foreign, json.dumps(packaged_schema("Trained")),
        conf={"auto.register.schemas": False, "subject.name.strategy": lambda context, name: name},
    )  # fmt: skip
    record = examples["Trained"]
    context = SerializationContext(connection.topic("ledger"), MessageField.VALUE)
    value: Any = serializer(to_plain(record), context)
    producer = connection.producer("foreign")
    connection.produce(producer, "ledger", value, partition=0)
    assert producer.flush(60) == 0
    assert [raw.decoded() for raw in connection.read_topic("ledger")] == [record]


def test_a_release_is_checked_against_every_earlier_one_by_the_registry_itself(registry: SchemaRegistry) -> None:
    """All released schemas of a record, oldest first, then today's: the server accepts each under the rule."""
    for name in RECORD_TYPES:
        subject = f"release-check.{subject_of(name)}"
        for schemas in released_schemas().values():
            if name in schemas:
                registry.register(subject, schemas[name])
                registry.set_compatibility(subject)
        assert registry.compatible(subject, packaged_schema(name)) == []
        registry.register(subject, packaged_schema(name))


def test_a_change_that_breaks_readers_is_refused_by_name(
    registry: SchemaRegistry, foreign: SchemaRegistryClient
) -> None:
    subject, good = subject_of("Head"), packaged_schema("Head")
    bad = {**good, "fields": [*good["fields"], {"name": "brand_new", "type": "long"}]}
    assert any("version 1" in reason for reason in registry.compatible(subject, bad))
    with pytest.raises(IncompatibleSchema, match=subject):
        registry.register(subject, bad)
    with pytest.raises(SchemaRegistryError):
        foreign.register_schema(subject, Schema(json.dumps(bad), "AVRO"))
    assert registered_ids(registry, ["Head"]), "the refused schema took the place of the good one"
    harmless = {**good, "fields": [*good["fields"], {"name": "brand_new", "type": "long", "default": 0}]}
    assert registry.compatible(subject, harmless) == []


def test_check_ends_with_1_when_the_registry_holds_what_this_release_cannot_read(server: Apicurio) -> None:
    """Another deployment registered something else under our subject."""
    client = SchemaRegistryClient({"url": server.url})
    subject = subject_of("EvalResult")
    held = client.get_latest_version(subject)
    fields = [{"name": "policy", "type": "string"}]
    odd = {"type": "record", "name": "EvalResult", "namespace": "headrace", "fields": fields}
    client.set_compatibility(subject, "NONE")
    client.delete_subject(subject)
    client.register_schema(subject, Schema(json.dumps(odd), "AVRO"))
    try:
        done = headrace("schema", "check", "--registry", server.url, "--format", "json")
        assert done.returncode == 1
        row = next(r for r in json.loads(done.stdout.rpartition("]")[0] + "]") if r["record"] == "EvalResult")
        assert row["state"] == "incompatible" and row["detail"].startswith("version ")
    finally:
        client.delete_subject(subject)
        client.register_schema(subject, held.schema)
