"""The connection's settings: what every client gets, where secrets come from, and that nothing shows them."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from headrace.connectors.kafka import MAX_MESSAGE_BYTES, Connection, Producer
from headrace.connectors.kafka_errors import BrokerUnreachable, ErrorLog, KafkaFailure, LoginRefused, explain
from headrace.schemas.codec import decode, encode, fingerprint
from headrace.schemas.config import KafkaConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Record

SECRET = "correct-horse-battery"


def secure(**settings: str) -> KafkaConfig:
    return KafkaConfig(
        bootstrap="kafka:9093",
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        ssl_ca_location="/etc/ca.pem",
        settings=settings,
    )


def test_the_given_address_wins_and_none_is_refused() -> None:
    assert Connection.of(KafkaConfig(bootstrap="a:1"), "run", "b:2").bootstrap == "b:2"
    assert Connection.of(KafkaConfig(bootstrap="a:1"), "run").bootstrap == "a:1"
    with pytest.raises(ConfigurationError, match=r"kafka\.bootstrap"):
        Connection.of(KafkaConfig(), "run")
    with pytest.raises(ConfigurationError, match="run id"):
        Connection.of(KafkaConfig(bootstrap="a:1"), "Not A Run")


def test_secrets_come_from_the_environment_and_are_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection.of(secure(), "run")
    with pytest.raises(ConfigurationError, match="HEADRACE_KAFKA_USERNAME"):
        connection.client_settings({}, {})
    monkeypatch.setenv("HEADRACE_KAFKA_USERNAME", "me")
    monkeypatch.setenv("HEADRACE_KAFKA_PASSWORD", SECRET)
    settings = connection.client_settings({"client.id": "c"}, {"linger_ms": 5})
    assert settings["sasl.password"] == SECRET
    assert settings["sasl.mechanism"] == "SCRAM-SHA-512"
    assert settings["ssl.ca.location"] == "/etc/ca.pem"
    assert settings["linger.ms"] == 5
    assert SECRET not in repr(connection) + str(vars(type(connection)))


def test_secrets_in_the_file_are_refused() -> None:
    for name in ("sasl.password", "ssl.key.password", "sasl.jaas.config"):
        with pytest.raises(ConfigurationError, match="environment variable"):
            Connection.of(secure(**{name: SECRET}), "run")


def test_a_private_key_in_the_file_is_refused_and_a_certificate_is_not() -> None:
    with pytest.raises(ConfigurationError, match=r"kafka\.ssl_key_location"):
        Connection.of(secure(**{"ssl.key.pem": SECRET}), "run")
    assert Connection.of(secure(**{"ssl.certificate.pem": "public"}), "run").run == "run"


def test_settings_of_the_file_go_to_every_client_and_the_callers_win() -> None:
    connection = Connection.of(KafkaConfig(bootstrap="a:1", settings={"client.rack": "r", "linger.ms": "9"}), "run")
    assert connection.client_settings({"linger.ms": 1}, {})["linger.ms"] == "9"
    assert connection.client_settings({"linger.ms": 1}, {"linger_ms": 2})["linger.ms"] == 2
    assert connection.client_settings({}, {})["client.rack"] == "r"


def test_topics_carry_the_runs_prefix() -> None:
    assert Connection.of(KafkaConfig(bootstrap="a:1"), "run").topic("prompts") == "run.prompts"
    assert MAX_MESSAGE_BYTES == 8 << 20


def test_a_registrys_ids_take_the_place_of_ours_on_topics_that_other_tools_read(
    monkeypatch: pytest.MonkeyPatch, examples: dict[str, Record]
) -> None:
    sent: dict[str, object] = {}
    monkeypatch.setattr(Producer, "produce", lambda _, topic, value=None, *rest, **where: sent.update({topic: value}))
    connection = Connection.of(KafkaConfig(bootstrap="127.0.0.1:1"), "run")
    value = encode(examples["Step"])
    connection.use_schema_ids({fingerprint("Step"): 258, "0123456789abcdef": 7})
    producer = connection.producer("test")
    for topic in ("run.steps", "run.dead-letters", "run.batch-state-changelog"):
        producer.produce(topic, value, partition=0)
    producer.produce("run.tasks", encode(examples["Task"]))
    producer.produce("run.deltas", None)
    producer.produce("run.evals", b"\0")
    assert sent["run.steps"] == b"\0\0\0\1\2" + value[5:]
    assert sent["run.dead-letters"] == sent["run.batch-state-changelog"] == value
    assert sent["run.tasks"] == encode(examples["Task"]), "a record without an id in the registry keeps ours"
    assert sent["run.deltas"] is None and sent["run.evals"] == b"\0"
    assert decode(b"\0\0\0\1\2" + value[5:]) == examples["Step"], "a foreign writer's record, without our header"
    assert "258" not in repr(connection)


def test_an_error_log_prefers_the_reason_over_the_summary() -> None:
    log = ErrorLog()
    assert log.last() == ""
    log(KafkaError(KafkaError._TRANSPORT, "connection refused"))
    log(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert log.last() == "_TRANSPORT: connection refused"
    assert log.count == 2
    log.raise_refused("a:1")
    log(KafkaError(KafkaError._AUTHENTICATION, "invalid credentials"))
    with pytest.raises(LoginRefused, match="a:1 refuses the login: invalid credentials"):
        log.raise_refused("a:1")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, LoginRefused),
        (KafkaError._AUTHENTICATION, LoginRefused),
        (KafkaError._TIMED_OUT, BrokerUnreachable),
        (KafkaError._TRANSPORT, BrokerUnreachable),
        (KafkaError.INVALID_REPLICATION_FACTOR, KafkaFailure),
    ],
)
def test_errors_are_explained_by_kind(code: int, kind: type[Exception]) -> None:
    error = explain(KafkaException(KafkaError(code)), "creating topics", "a:1")
    assert type(error) is kind
    assert "creating topics" in str(error)
    assert "a:1" in str(error)
