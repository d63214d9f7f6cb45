"""Brokers as processes that a test may kill, freeze and start again: the local broker and Apache Kafka from jars."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from headrace.connectors.kafka import Connection
from headrace.schemas.config import KafkaConfig

LIBS = "HEADRACE_KAFKA_LIBS"
PROPERTIES = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}/logs
offsets.topic.replication.factor=1
offsets.topic.num.partitions=3
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=3
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
transaction.abort.timed.out.transaction.cleanup.interval.ms=1000
"""


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """One broker on a data folder, at one address over all its lives."""

    name = ""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = free_port()
        self.bootstrap = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._log = os.open(data.parent / f"{data.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        """Start and wait until it answers."""
        self._process = subprocess.Popen(
            self.command(), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )
        Connection.of(KafkaConfig(), "probe", self.bootstrap).wait_for_broker(60)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self, seconds: float) -> None:
        """Stop it for a while and let it go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(self._process.pid, signal.SIGCONT)


class LocalBroker(Server):
    """The local broker."""

    name = "local"

    def command(self) -> list[str]:
        return [
            sys.executable,
            *("-m", "headrace.connectors.broker", "--data", str(self.data), "--port", str(self.port)),
        ]


class ApacheKafka(Server):
    """Apache Kafka from jars, one KRaft node."""

    name = "kafka"

    def __init__(self, data: Path) -> None:
        super().__init__(data)
        data.mkdir(parents=True, exist_ok=True)
        self._file = data / "server.properties"
        self._file.write_text(PROPERTIES.format(port=self.port, controller=free_port(), data=data))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode().replace("-", "x")
        subprocess.run(
            [*self._java("kafka.tools.StorageTool"), "format", "-t", cluster, "-c", str(self._file)],
            check=True,
            stdout=self._log,
            stderr=self._log,
        )

    def command(self) -> list[str]:
        return [*self._java("kafka.Kafka"), str(self._file)]

    def _java(self, main: str) -> list[str]:
        libs = Path(os.environ[LIBS])
        flags = ["-Xmx384m", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        return ["java", *flags, "-cp", f"{libs}/*", main]


SERVERS: dict[str, type[Server]] = {"local": LocalBroker, "kafka": ApacheKafka}
