"""A secure Kafka: every role does its part of a whole run, forbidden acts are refused, refusals say what is wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from apicurio import FOLDER, Apicurio
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from foreign_reader import undecodable
from tiny_run import headrace, tiny_config

from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_cluster import Cluster, Plan
from headrace.connectors.kafka_errors import LoginRefused
from headrace.connectors.kafka_jars import LIBS_VARIABLE, find_java
from headrace.connectors.kafka_node import free_port
from headrace.schemas.access import ROLES, grants_of
from headrace.schemas.config import KafkaConfig
from headrace.schemas.topics import TOPICS, partition_counts

if not os.environ.get(LIBS_VARIABLE):
    pytest.skip(f"a secure Kafka from jars: set {LIBS_VARIABLE} (Java 17)", allow_module_level=True)

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]
RUN = "guarded"
DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}
OWNERS = {
    "schedule": "operators", "assemble": "operators", "batch": "operators", "source": "source", "trainer": "trainer",
}  # fmt: skip
"""First word of a transactional id -> the role that may take it."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node with logins, on which the administrator has given the rights of RUN by our command."""
    made = Cluster(tmp_path_factory.mktemp("secure") / "kafka")
    plan = Plan(port=free_port(), secure=True, users=tuple(ROLES))
    try:
        made.up(plan, find_java(), Path(os.environ[LIBS_VARIABLE]), heap="384m", test=True)
        done = headrace("kafka", "acls", "--run", RUN, "--state", str(made.folder), "--apply")
        assert done.returncode == 0, done.stdout
        yield made
    finally:
        made.down(delete=True)


@pytest.fixture(scope="module")
def topics(cluster: Cluster) -> dict[str, int]:
    """The run's topics, made by the launcher's login."""
    counts = partition_counts(["main"], groups=1, inboxes=1, lanes=1)
    connect(cluster, "launcher").ensure_topics(counts)
    return counts


def connect(cluster: Cluster, role: str, run: str = RUN, **keys: str) -> Connection:
    return Connection.of(KafkaConfig.model_validate({**cluster.login(role), **keys}), run, role=role)


def client(cluster: Cluster, role: str, **over: Any) -> dict[str, Any]:
    """Settings of a bare client with the login of a role; errors that it reports on its own are not printed."""
    quiet = {"error_cb": lambda error: None, **{name.replace("_", "."): value for name, value in over.items()}}
    return connect(cluster, role).client_settings(quiet, {})


def together(act: Callable[[str, str], int], wanted: list[tuple[str, str]]) -> list[int]:
    """The outcome of each act; most of their time is waiting."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda words: act(*words), wanted))


def code_of(error: BaseException) -> int:
    return int(error.args[0].code())


def test_every_role_does_its_part_of_a_whole_run_with_a_registry(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    """Each process logs in as its role; a foreign client with the registry's URL decodes every topic."""
    folder = os.environ.get(FOLDER)
    registry = Apicurio(Path(folder), tmp_path / "registry.log") if folder else None
    run = "whole"
    try:
        given = headrace("kafka", "acls", "--run", run, "--state", str(cluster.folder), "--apply")
        assert given.returncode == 0, given.stdout
        sections: dict[str, dict[str, Any]] = {"kafka": cluster.login("{role}")}
        if registry is not None:
            registry.wait_ready()
            assert headrace("schema", "register", "--registry", registry.url).returncode == 0
            sections["registry"] = {"url": registry.url}
        config = tiny_config(tmp_path, tiny_model, run, **sections)
        done = headrace("run", "@", str(config))
        assert done.returncode == 0, done.stdout
        verified = headrace("verify", str(tmp_path / run))
        assert verified.returncode == 0, verified.stdout
        listed = headrace("topics", "list", "--folder", str(tmp_path / run))
        assert listed.returncode == 0, listed.stdout
        if registry is not None:
            reader = connect(cluster, "inspector", run)
            counts, wrong = undecodable(reader, registry.url)
            assert not wrong
            assert set(counts) == {spec.name for spec in TOPICS} - {"partials", "evals", "dead-letters"}
        gone = headrace("kafka", "acls", "--run", run, "--state", str(cluster.folder), "--remove")
        assert "took away" in gone.stdout
    finally:
        if registry is not None:
            registry.stop()
    said = done.stdout + verified.stdout + "".join(
        path.read_text("utf-8", "replace") for path in (tmp_path / run).rglob("*") if path.suffix in (".log", ".json")
    )  # fmt: skip
    for role in ROLES:
        password = (cluster.secrets / f"{role}.password").read_text()
        assert password not in said, f"the password of {role} was written"


@pytest.mark.parametrize("role", ROLES)
def test_a_role_writes_what_the_map_says_and_nothing_else(cluster: Cluster, topics: dict[str, int], role: str) -> None:
    allowed = {g.name for g in grants_of(RUN) if g.role == role and g.resource == "topic" and g.operation == "WRITE"}
    outcome: dict[str, int] = {}
    producer = Producer(client(cluster, role, message_timeout_ms=30_000))

    def note(error: KafkaError | None, topic: str) -> None:
        outcome[topic] = error.code() if error else 0

    for name in topics:
        topic = f"{RUN}.{name}"
        producer.produce(topic, b"x", b"key", 0, on_delivery=lambda error, _, topic=topic: note(error, topic))
    assert producer.flush(60) == 0
    for topic, code in outcome.items():
        may = any(topic == name or (name.endswith(".") and topic.startswith(name)) for name in allowed)
        assert code == (0 if may else KafkaError.TOPIC_AUTHORIZATION_FAILED), f"{role} on {topic}: {code}"
    assert len(outcome) == len(topics)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_reads_what_the_map_says_and_nothing_else(cluster: Cluster, topics: dict[str, int], role: str) -> None:
    grants = [g for g in grants_of(RUN) if g.role == role and g.resource == "topic" and g.operation == "READ"]
    outcome: dict[str, int] = {}
    consumer = Consumer(
        client(cluster, role, group_id=f"{RUN}.reader.test", enable_partition_eof=True, fetch_wait_max_ms=10)
    )
    try:
        for name in topics:  # what may not even be described is not fetched by the client
            error = consumer.list_topics(f"{RUN}.{name}", timeout=30).topics[f"{RUN}.{name}"].error
            if error is not None:
                outcome[f"{RUN}.{name}"] = error.code()
        left = [f"{RUN}.{name}" for name in topics if f"{RUN}.{name}" not in outcome]
        consumer.assign([TopicPartition(topic, 0, 0) for topic in left])
        end = time.monotonic() + 60
        while not outcome.keys() >= set(left) and time.monotonic() < end:
            message = consumer.poll(0.5)
            if message is not None and message.topic():
                error = message.error()
                outcome.setdefault(message.topic() or "", 0 if error is None else error.code())
    finally:
        consumer.close()
    for name in topics:
        topic = f"{RUN}.{name}"
        may = any(topic == g.name or (g.prefixed and topic.startswith(g.name)) for g in grants)
        code = outcome.get(topic)
        expected = {0, KafkaError._PARTITION_EOF} if may else {KafkaError.TOPIC_AUTHORIZATION_FAILED}
        assert code in expected, f"{role} on {topic}: {code}"


def test_transactional_ids_belong_to_their_roles(cluster: Cluster) -> None:
    """Each role takes its own; it is refused those of others and of another run."""

    def taken(role: str, name: str) -> int:
        try:
            Producer(client(cluster, role, transactional_id=name)).init_transactions(60)
        except KafkaException as error:
            return code_of(error)
        return 0

    wanted = [(role, f"{RUN}.{owner}.x") for role in ROLES for owner in OWNERS]
    wanted += [(role, f"another.{owner}.x") for owner, role in OWNERS.items()]
    for (role, name), code in zip(wanted, together(taken, wanted), strict=True):
        mine = name.startswith(RUN) and OWNERS[name.split(".")[1]] == role
        assert code == (0 if mine else KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), f"{role} and {name}: {code}"


def test_consumer_groups_belong_to_their_roles(cluster: Cluster, topics: dict[str, int]) -> None:
    """A position may be set by the group's own role alone, even on a topic that the role may read."""
    reads = {"rollout": "tasks", "operators": "ledger", "trainer": "steps"}

    def committed(role: str, group: str) -> int:
        place = TopicPartition(f"{RUN}.{reads.get(role, 'run')}", 0, 0)
        admin = AdminClient(client(cluster, role))
        (future,) = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, [place])]).values()
        try:
            (done,) = future.result(60).topic_partitions
        except KafkaException as error:
            return code_of(error)
        return int(done.error.code()) if done.error else 0

    owners = {f"{RUN}.{sub}": "operators" for sub in ("schedule", "assemble", "batch")}
    owners[f"{RUN}.trainer.main"] = "trainer"
    wanted = [(role, group) for role in ROLES for group in owners] + [("operators", "another.batch")]
    for (role, group), code in zip(wanted, together(committed, wanted), strict=True):
        mine = owners.get(group) == role
        assert code == (0 if mine else KafkaError.GROUP_AUTHORIZATION_FAILED), f"{role} and {group}: {code}"


def test_only_the_launcher_makes_and_removes_topics_and_only_of_its_run(
    cluster: Cluster, topics: dict[str, int]
) -> None:
    for role in ROLES:
        admin = AdminClient(client(cluster, role))
        mine, foreign = f"{RUN}.made-by-{role}", "another.topic"
        outcome = {}
        for name in (mine, foreign):
            try:
                admin.create_topics([NewTopic(name, 1)])[name].result(60)
                outcome[name] = 0
            except KafkaException as error:
                outcome[name] = code_of(error)
        assert outcome[foreign] in DENIED, role
        assert (outcome[mine] == 0) is (role == "launcher"), f"{role}: {outcome}"
        victim = mine if role == "launcher" else f"{RUN}.steps"
        try:
            admin.delete_topics([victim])[victim].result(60)
            assert role == "launcher", f"{role} deleted {victim}"
        except KafkaException as error:
            assert role != "launcher" and code_of(error) in DENIED, f"{role}: {error}"


def test_no_role_gives_rights(cluster: Cluster) -> None:
    wanted = AclBinding(
        ResourceType.TOPIC, "*", ResourcePatternType.LITERAL, "User:rollout", "*", AclOperation.ALL,
        AclPermissionType.ALLOW,
    )  # fmt: skip
    for role in ROLES:
        admin = AdminClient(client(cluster, role))
        (future,) = admin.create_acls([wanted]).values()
        with pytest.raises(KafkaException) as refused:
            future.result(60)
        assert code_of(refused.value) == KafkaError.CLUSTER_AUTHORIZATION_FAILED, role


def test_a_wrong_password_and_a_foreign_certificate_say_so(cluster: Cluster, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.password"
    wrong.write_text("guess")
    with pytest.raises(LoginRefused, match=r"refuses the login.*invalid credentials"):
        connect(cluster, "trainer", sasl_password_file=str(wrong)).wait_for_broker(60)
    with pytest.raises(LoginRefused, match="certificate could not be verified"):
        connect(cluster, "trainer", ssl_ca_location="").wait_for_broker(60)
    with pytest.raises(LoginRefused, match="mechanism"):
        connect(cluster, "trainer", sasl_mechanism="PLAIN").wait_for_broker(60)


def test_plain_text_to_a_tls_port_says_so_at_once_and_ends_a_command(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(LoginRefused, match=r"speaks TLS and kafka\.security_protocol is PLAINTEXT: set it to SASL_SSL"):
        Connection.of(KafkaConfig(), RUN, cluster.bootstrap()).wait_for_broker(60)
    config = tmp_path / "plain.toml"
    config.write_text(f'[kafka]\nbootstrap = "{cluster.bootstrap()}"\n')
    done = headrace("kafka", "acls", "--run", RUN, "--config", str(config), "--apply")
    assert done.returncode == 78
    assert "speaks TLS" in done.stdout and "Traceback" not in done.stdout
    done = headrace("topics", "list", "--run", RUN, "--bootstrap", cluster.bootstrap())
    assert done.returncode == 78 and "speaks TLS" in done.stdout


def test_what_is_denied_later_names_the_act_and_the_cluster(cluster: Cluster, topics: dict[str, int]) -> None:
    rollout = connect(cluster, "rollout")
    with pytest.raises(LoginRefused, match=f"creating topics on the cluster at {cluster.bootstrap()} is refused"):
        rollout.ensure_topics({"tasks": 1, "batches.other": 1})
    assert {spec.name for spec in TOPICS} > set(rollout.list_run_topics())
