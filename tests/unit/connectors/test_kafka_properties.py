"""Settings of nodes: quorum, copies, listeners, and a secure cluster that trusts nobody by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.connectors.kafka_properties import ADMIN, Ports, Security, node_properties

ONE = {1: Ports(9092, 19092)}
THREE = {n: Ports(9091 + n, 19091 + n) for n in (1, 2, 3)}
SECURITY = Security(
    keystore=Path("/s/node.p12"), certificate=Path("/s/ca.pem"), keystore_password="k-secret", admin_password="a-secret"
)


def parsed(text: str) -> dict[str, str]:
    lines = [line.partition("=") for line in text.splitlines()]
    assert len({key for key, _, _ in lines}) == len(lines), "a setting stands twice"
    return {key: value for key, _, value in lines}


@pytest.mark.parametrize(("nodes", "copies", "least"), [(ONE, "1", "1"), (THREE, "3", "2")])
def test_internal_topics_have_as_many_copies_as_nodes_and_survive_one_loss(
    nodes: dict[int, Ports], copies: str, least: str
) -> None:
    settings = parsed(node_properties(1, nodes, Path("/d")))
    for name in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
        assert settings[f"{name}.replication.factor"] == copies
    assert settings["transaction.state.log.min.isr"] == settings["min.insync.replicas"] == least


def test_each_node_knows_the_others_and_listens_on_loopback_alone() -> None:
    for number, ports in THREE.items():
        settings = parsed(node_properties(number, THREE, Path("/d")))
        assert settings["node.id"] == str(number)
        assert settings["controller.quorum.voters"] == "1@127.0.0.1:19092,2@127.0.0.1:19093,3@127.0.0.1:19094"
        assert settings["listeners"] == (
            f"PLAINTEXT://127.0.0.1:{ports.client},CONTROLLER://127.0.0.1:{ports.controller}"
        )


def test_people_get_no_topics_by_mistake_and_tests_get_quick_housekeeping() -> None:
    people, test = parsed(node_properties(1, ONE, Path("/d"))), parsed(node_properties(1, ONE, Path("/d"), test=True))
    assert people["auto.create.topics.enable"] == "false" and "log.cleaner.backoff.ms" not in people
    assert test["log.cleaner.backoff.ms"] == "500" and "auto.create.topics.enable" not in test


def test_a_secure_node_encrypts_asks_and_allows_nothing_by_itself() -> None:
    settings = parsed(node_properties(1, ONE, Path("/d"), security=SECURITY))
    assert settings["listener.security.protocol.map"] == "CONTROLLER:SSL,SASL_SSL:SASL_SSL"
    assert settings["listener.name.controller.ssl.client.auth"] == "required"
    assert settings["allow.everyone.if.no.acl.found"] == "false"
    assert settings["authorizer.class.name"].endswith("StandardAuthorizer")
    users = settings["super.users"].split(";")
    assert users == [f"User:{ADMIN}", "User:CN=headrace-node"]
    assert "ANONYMOUS" not in settings["super.users"]
    assert "PLAINTEXT" not in "".join(settings.values())


def test_a_repr_shows_no_secret() -> None:
    assert "secret" not in repr(SECURITY)
