"""Start nodes of Apache Kafka 4 from a folder of jars: no Docker, no installation, only Java 17.

In: a folder with Kafka's jars (any download's `libs`), a data folder, ports. Out: processes that serve on 127.0.0.1.
``KafkaNode`` is one plain node for tests and benchmarks, with housekeeping every second so that retention and
compaction can be watched; ``kafka_cluster`` keeps nodes for people. `python -m headrace.connectors.kafka_node LIBS DATA
PORT` runs one in the foreground.
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
from collections.abc import Sequence
from pathlib import Path

from headrace.connectors.kafka_jars import main_class
from headrace.connectors.kafka_properties import Ports, node_properties
from headrace.schemas.errors import ConfigurationError

__all__ = ("KafkaNode", "format_node", "free_port", "launch_node", "new_cluster_id")

_STORAGE_TOOLS = ("kafka.tools.StorageTool", "org.apache.kafka.tools.StorageTool")
_SERVERS = ("kafka.Kafka", "org.apache.kafka.server.Kafka")
_QUIET = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
_READY_SECONDS = 60


def format_node(java: str, libs: Path, settings: Path, cluster: str, users: Sequence[str] = ()) -> None:
    """Make the data folder that the file ``settings`` names; ``users`` are what ``--add-scram`` takes.

    Raises ConfigurationError with what the tool said.
    """
    tool = main_class(libs, _STORAGE_TOOLS)
    scram = [word for user in users for word in ("--add-scram", user)]
    done = subprocess.run(
        [java, "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", _QUIET, "-cp", str(libs.resolve() / "*"),
         tool, "format", "-t", cluster, "-c", str(settings), *scram],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-1500:]
        raise ConfigurationError(f"the data folder of {settings} could not be formatted: {said}")


def launch_node(java: str, libs: Path, settings: Path, log: Path, heap: str) -> subprocess.Popen[bytes]:
    """Start the node of a formatted data folder in a process group of its own; its output is added to ``log``."""
    server = main_class(libs, _SERVERS)
    with log.open("ab") as out:
        return subprocess.Popen(
            [java, f"-Xmx{heap}", "-XX:+UseSerialGC", _QUIET, "-cp", str(libs.resolve() / "*"), server, str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class KafkaNode:
    """One running node; `bootstrap` is its address. Raises `ConfigurationError` when it cannot start.

    The controller listens on a port of its own, which is chosen here. The process gets a group of its own, so that
    `stop` ends the whole of it.
    """

    def __init__(self, libs: Path, data: Path, port: int, heap: str = "512m") -> None:
        self.bootstrap = f"127.0.0.1:{port}"
        java = os.environ.get("JAVA") or shutil.which("java")
        if java is None:
            raise ConfigurationError("Apache Kafka needs Java 17: no `java` on the path and no JAVA in the environment")
        data.mkdir(parents=True, exist_ok=True)
        settings, logs = data / "server.properties", (data / "logs").resolve()
        settings.write_text(node_properties(1, {1: Ports(port, free_port())}, logs, test=True))
        if not (logs / "meta.properties").exists():
            format_node(java, libs, settings, new_cluster_id())
        self.log = data / "server.out"
        self.log.unlink(missing_ok=True)
        self.process = launch_node(java, libs, settings, self.log, heap)

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


def new_cluster_id() -> str:
    """16 random bytes in URL-safe base64 that do not look like an option."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        if not text.startswith("-"):
            return text


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
