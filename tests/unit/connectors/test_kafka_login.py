"""Logins: from files or the environment, by role, and never from nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_login import login_settings
from headrace.schemas.config import KafkaConfig
from headrace.schemas.errors import ConfigurationError

SECRET = "correct-horse-battery"


def secure(**keys: str) -> KafkaConfig:
    given = {"bootstrap": "a:1", "security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512", **keys}
    return KafkaConfig.model_validate(given)


def test_a_plain_connection_needs_no_login() -> None:
    assert login_settings(KafkaConfig(), "trainer") == {}


def test_each_role_takes_its_own_user_and_file(tmp_path: Path) -> None:
    for role in ("trainer", "source"):
        (tmp_path / f"{role}.password").write_text(f"{SECRET}-{role}\n")
    config = secure(sasl_username="svc-{role}", sasl_password_file=str(tmp_path / "{role}.password"))
    for role in ("trainer", "source"):
        assert login_settings(config, role) == {
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": f"svc-{role}",
            "sasl.password": f"{SECRET}-{role}",
        }
        connection = Connection.of(config, "run", role=role)
        assert connection.client_settings({}, {})["sasl.username"] == f"svc-{role}"
        assert SECRET not in repr(connection) + config.model_dump_json()


def test_spaces_of_a_password_count_and_the_line_end_does_not(tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_bytes(b" two words \r\n")
    found = login_settings(secure(sasl_username="u", sasl_password_file=str(file)), "x")
    assert found["sasl.password"] == " two words "


def test_the_environment_serves_where_no_key_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KAFKA_USERNAME", "env-user")
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    found = login_settings(secure(sasl_password_env="MY_PASSWORD"), "trainer")
    assert (found["sasl.username"], found["sasl.password"]) == ("env-user", SECRET)
    assert login_settings(secure(sasl_username="me", sasl_password_env="MY_PASSWORD"), "x")["sasl.username"] == "me"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_KAFKA_USERNAME", raising=False)
    with pytest.raises(ConfigurationError, match="HEADRACE_KAFKA_USERNAME is not set"):
        login_settings(secure(), "trainer")
    gone = secure(sasl_username="u", sasl_password_file=str(tmp_path / "{role}"))
    with pytest.raises(ConfigurationError, match=f"cannot read {tmp_path}/nobody as nobody.*roles are launcher"):
        login_settings(gone, "nobody")


def test_the_password_of_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = KafkaConfig(bootstrap="a:1", security_protocol="SSL", ssl_key_location="/k", ssl_key_password_env="KEY")
    with pytest.raises(ConfigurationError, match="KEY is not set"):
        login_settings(config, "trainer")
    monkeypatch.setenv("KEY", SECRET)
    assert Connection.of(config, "run").client_settings({}, {})["ssl.key.password"] == SECRET
