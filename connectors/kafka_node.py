"""Start one node of Apache Kafka 4 from a folder of jars: no Docker, no installation, only Java 17.

In: a folder with Kafka's jars (any download's `libs`), a data folder, a port. Out: a process that serves on 127.0.0.1.
It is for contract tests, benchmarks and laptops: one KRaft node, plaintext, housekeeping every second so that retention
and compaction can be watched. `python -m headrace.connectors.kafka_node LIBS DATA PORT` runs it in the foreground.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
import zipfile
from pathlib import Path

from headrace.schemas.errors import ConfigurationError

__all__ = ("KafkaNode",)

_STORAGE_TOOLS = ("kafka.tools.StorageTool", "org.apache.kafka.tools.StorageTool")
_SERVERS = ("kafka.Kafka", "org.apache.kafka.server.Kafka")
_QUIET = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
_READY_SECONDS = 60

_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={logs}
num.partitions=4
offsets.topic.replication.factor=1
offsets.topic.num.partitions=3
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=3
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=100
log.retention.check.interval.ms=1000
log.cleaner.backoff.ms=500
log.initial.task.delay.ms=500
log.segment.delete.delay.ms=500
transaction.abort.timed.out.transaction.cleanup.interval.ms=500
"""


class KafkaNode:
    """One running node; `bootstrap` is its address. Raises `ConfigurationError` when it cannot start.

    The controller listens on a port of its own, which is chosen here. The process gets a group of its own, so that
    `stop` ends the whole of it.
    """

    def __init__(self, libs: Path, data: Path, port: int, heap: str = "512m") -> None:
        self.bootstrap = f"127.0.0.1:{port}"
        self._port = port
        java = os.environ.get("JAVA") or shutil.which("java")
        if java is None:
            raise ConfigurationError("Apache Kafka needs Java 17: no `java` on the path and no JAVA in the environment")
        data.mkdir(parents=True, exist_ok=True)
        settings = data / "server.properties"
        logs = (data / "logs").resolve()
        settings.write_text(_PROPERTIES.format(port=port, controller=free_port(), logs=logs))
        classes = str(libs.resolve() / "*")
        tool, server = _main_class(libs, _STORAGE_TOOLS), _main_class(libs, _SERVERS)
        format_command = [java, "-Xmx128m", "-XX:+UseSerialGC", _QUIET, "-cp", classes, tool, "format"]
        if not (logs / "meta.properties").exists():
            subprocess.run(
                [*format_command, "-t", _cluster_id(), "-c", str(settings)], check=True, stdout=subprocess.DEVNULL
            )
        self.log = data / "server.out"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [java, f"-Xmx{heap}", "-XX:+UseSerialGC", _QUIET, "-cp", classes, server, str(settings)],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, seconds: float = _READY_SECONDS) -> None:
        """Return when the node answers; raises `ConfigurationError` with the end of its log when it does not."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        client = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                client.list_topics(timeout=2)
                return
            except KafkaException:
                time.sleep(0.05)
        self.stop()
        tail = self.log.read_text(errors="replace")[-2000:]
        raise ConfigurationError(f"Apache Kafka did not start on {self.bootstrap}: see {self.log}\n{tail}")

    def stop(self, grace: float = 5.0) -> None:
        """End the node and everything it started."""
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
            if self.process.poll() is not None:
                return
            os.killpg(self.process.pid, number)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _cluster_id() -> str:
    """16 random bytes in URL-safe base64 that do not look like an option."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        if not text.startswith("-"):
            return text


def _main_class(libs: Path, names: tuple[str, ...]) -> str:
    """The first of these classes that the jars have; Kafka moves them between versions."""
    have: set[str] = set()
    for jar in libs.glob("kafka*.jar"):
        with zipfile.ZipFile(jar) as archive:
            have.update(archive.namelist())
    for name in names:
        if name.replace(".", "/") + ".class" in have:
            return name
    raise ConfigurationError(f"{libs} is not the `libs` folder of Apache Kafka 4: none of {', '.join(names)} in it")


def main() -> None:
    """Run one node until a signal."""
    libs, data, port = sys.argv[1:4]
    node = KafkaNode(Path(libs), Path(data), int(port))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.stop())
    node.wait_ready()
    print(f"ready {port}", flush=True)
    sys.exit(node.process.wait())


if __name__ == "__main__":
    main()
