"""The images of the compose file as real servers, where a container engine runs: Kafka, registry, object store.

Each container gets the image and settings that stand in the file, so the file is what is tested; only addresses differ.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml
from confluent_kafka import Consumer
from docker.errors import DockerException
from foreign_reader import undecodable
from kafka_kit import unique
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network
from tiny_run import headrace

from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_node import free_port
from headrace.connectors.registry import SchemaRegistry
from headrace.connectors.schema_ids import take_schema_ids
from headrace.connectors.stores.open import open_store
from headrace.connectors.stores.probe import probe_create_only
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import KafkaConfig, RegistryConfig, StoreConfig
from headrace.schemas.errors import HeadraceError
from headrace.schemas.records import Record


def engine_answers() -> bool:
    """Whether a container engine takes requests from this process."""
    try:
        client = docker.from_env(timeout=5)
        client.ping()
    except (DockerException, OSError):
        return False
    client.close()
    return True


if not engine_answers():
    pytest.skip("no container engine answers, so the images of the compose file are not run", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)
COMPOSE = Path(__file__).resolve().parents[2] / "infra" / "docker-compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
SECONDS = 180.0


def container(name: str, port: int, *, entrypoint: list[str] | None = None, **over: str) -> DockerContainer:
    """A service of the compose file with its port on the host; `over` are environment variables that differ."""
    service = SERVICES[name]
    plain = re.compile(r"\$\{\w+:-([^}]*)\}")
    options = {key: service[key] for key in ("mem_limit", "hostname", "entrypoint") if key in service}
    if entrypoint is not None:
        options["entrypoint"] = entrypoint
    made = DockerContainer(plain.sub(r"\1", service["image"]), **options)
    inner = int(service["ports"][0].rsplit(":", 1)[1])
    made.with_bind_ports(inner, port)
    for key, value in {**service["environment"], **over}.items():
        made.with_env(key, plain.sub(r"\1", str(value)))
    if "command" in service and entrypoint is None:
        made.with_command(service["command"])
    return made


def wait_for(act: Callable[[], object], of: DockerContainer) -> None:
    """Repeat `act` until it raises no more; then a server answers."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            act()
            return
        except (HeadraceError, OSError) as error:
            out, err = of.get_logs()
            assert time.monotonic() < end, f"{error}\n{(out + err)[-2000:].decode('utf-8', 'replace')}"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(scope="module")
def kafka(network: Network) -> Iterator[str]:
    port = free_port()
    outside = f"INTERNAL://kafka:29092,EXTERNAL://127.0.0.1:{port}"
    made = container("kafka", port, KAFKA_ADVERTISED_LISTENERS=outside).with_network(network)
    with made.with_network_aliases("kafka"):
        Connection.of(KafkaConfig(), "probe", f"127.0.0.1:{port}").wait_for_broker(SECONDS)
        yield f"127.0.0.1:{port}"


def test_kafka_commits_transactions_and_makes_no_topic_by_mistake(kafka: str, examples: dict[str, Record]) -> None:
    connection = Connection.of(KafkaConfig(), unique("box"), kafka)
    connection.ensure_topics({"prompts": 1})
    producer = connection.producer("source", f"{connection.run}.source.main")
    producer.init_transactions(60)
    for commit in (True, False):
        producer.begin_transaction()
        record = examples["Prompt"]
        headers = headers_of(record, connection.run, "0")
        connection.produce(producer, "prompts", encode(record), partition=0, headers=headers)
        producer.flush(30)
        (producer.commit_transaction if commit else producer.abort_transaction)(60)
    assert [raw.decoded() for raw in connection.read_topic("prompts")] == [examples["Prompt"]]
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "g", "allow.auto.create.topics": True})
    consumer.list_topics(f"{connection.run}.prompt", timeout=30)
    consumer.close()
    assert set(connection.list_run_topics()) == {"prompts"}


def test_the_registry_takes_our_schemas_and_serves_foreign_clients(
    kafka: str, network: Network, examples: dict[str, Record]
) -> None:
    port = free_port()
    with container("registry", port).with_network(network) as server:
        url = f"http://127.0.0.1:{port}"
        wait_for(SchemaRegistry(RegistryConfig(url=url)).probe, server)
        assert headrace("schema", "register", "--registry", url).returncode == 0
        assert headrace("schema", "check", "--registry", url).returncode == 0
        connection = Connection.of(KafkaConfig(), unique("box"), kafka)
        connection.ensure_topics({"ledger": 1})
        take_schema_ids(connection, RegistryConfig(url=url))
        producer = connection.producer("test")
        for name in ("Opened", "Kept", "Closed", "Batched", "Trained"):
            headers = headers_of(examples[name], connection.run, "0")
            connection.produce(producer, "ledger", encode(examples[name]), partition=0, headers=headers)
        assert producer.flush(60) == 0
        assert undecodable(connection, url) == ({"ledger": 5}, [])


def test_of_racing_writers_in_the_object_store_exactly_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SERVICES["objects"]["environment"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", settings["ROOT_ACCESS_KEY"].split(":-")[1].rstrip("}"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", settings["ROOT_SECRET_KEY"].split(":-")[1].rstrip("}"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    port = free_port()
    starts = ["/bin/sh", "-c", "mkdir -p /data/headrace && exec versitygw posix /data"]
    with container("objects", port, entrypoint=starts) as server:
        store = open_store(
            StoreConfig(url="s3://headrace/test", endpoint_url=f"http://127.0.0.1:{port}", region="us-east-1")
        )
        wait_for(lambda: list(store.list("")), server)
        assert probe_create_only(store).create_only
