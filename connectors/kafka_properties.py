"""The settings file of one node of Apache Kafka in KRaft mode: broker and controller in one process, on 127.0.0.1.

Pure functions: a plan of the cluster goes in, the text of ``server.properties`` comes out. Plain text, or TLS with
SCRAM logins, an authorizer that allows nothing by itself, and a controller listener that only the nodes can join.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ("ADMIN", "MECHANISM", "NODE_NAME", "Ports", "Security", "node_properties")

ADMIN = "admin"
"""The super user of a secure cluster; nodes log in as this one, and so do administrators."""
MECHANISM = "SCRAM-SHA-512"
"""How clients of a secure cluster log in."""
NODE_NAME = "headrace-node"
"""Common name of the nodes' certificate; the controller listener knows the nodes by it."""

_HOUSEKEEPING_EVERY_SECOND: Mapping[str, object] = {
    "log.retention.check.interval.ms": 1000,
    "log.cleaner.backoff.ms": 500,
    "log.initial.task.delay.ms": 500,
    "log.segment.delete.delay.ms": 500,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
    "group.min.session.timeout.ms": 100,
    "num.partitions": 4,
}
"""For tests, which want to see retention, compaction and dead members within seconds."""

_LOSS_WITHIN_SECONDS: Mapping[str, object] = {"broker.session.timeout.ms": 3000, "broker.heartbeat.interval.ms": 500}
"""For tests that kill one of several nodes: the others notice after 3 s instead of 9."""

_FOR_RUNS: Mapping[str, object] = {
    "auto.create.topics.enable": "false",
    "offsets.retention.minutes": 525_600,
}
"""A misspelt topic is an error; positions of a run that rests over a holiday are still there."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where one node listens: for clients, and for the other nodes' controllers."""

    client: int
    controller: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Files and secrets of a secure cluster. The passwords show in no repr."""

    keystore: Path
    certificate: Path
    keystore_password: str
    admin_password: str

    def __repr__(self) -> str:
        return f"Security(keystore={str(self.keystore)!r}, certificate={str(self.certificate)!r})"


def node_properties(
    number: int, nodes: Mapping[int, Ports], logs: Path, *, security: Security | None = None, test: bool = False
) -> str:
    """The text of ``server.properties`` for node ``number`` of ``nodes``, with its data in ``logs``.

    ``test`` asks for housekeeping every second. Internal topics get min(3, nodes) copies.
    """
    ports, copies = nodes[number], min(3, len(nodes))
    name = "SASL_SSL" if security else "PLAINTEXT"
    voters = ",".join(f"{n}@127.0.0.1:{p.controller}" for n, p in sorted(nodes.items()))
    settings: dict[str, object] = {
        "process.roles": "broker,controller",
        "node.id": number,
        "controller.quorum.voters": voters,
        "listeners": f"{name}://127.0.0.1:{ports.client},CONTROLLER://127.0.0.1:{ports.controller}",
        "advertised.listeners": f"{name}://127.0.0.1:{ports.client}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": name,
        "listener.security.protocol.map": f"CONTROLLER:{'SSL' if security else 'PLAINTEXT'},{name}:{name}",
        "log.dirs": logs,
        "default.replication.factor": copies,
        "min.insync.replicas": max(1, copies - 1),
        "offsets.topic.replication.factor": copies,
        "offsets.topic.num.partitions": 3,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": max(1, copies - 1),
        "transaction.state.log.num.partitions": 3,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": max(1, copies - 1),
        "group.initial.rebalance.delay.ms": 0,
        **(_HOUSEKEEPING_EVERY_SECOND if test else _FOR_RUNS),
        **(_LOSS_WITHIN_SECONDS if test and copies > 1 else {}),
        **(_secure_settings(security) if security else {}),
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def _secure_settings(security: Security) -> dict[str, object]:
    login = (
        "org.apache.kafka.common.security.scram.ScramLoginModule required "
        f'username="{ADMIN}" password="{security.admin_password}";'
    )
    return {
        "sasl.enabled.mechanisms": MECHANISM,
        "sasl.mechanism.inter.broker.protocol": MECHANISM,
        f"listener.name.sasl_ssl.{MECHANISM.lower()}.sasl.jaas.config": login,
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": security.keystore,
        "ssl.keystore.password": security.keystore_password,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": security.certificate,
        "listener.name.controller.ssl.client.auth": "required",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "false",
        "super.users": f"User:{ADMIN};User:CN={NODE_NAME}",
    }
