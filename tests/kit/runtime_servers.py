"""Brokers as processes that a test may kill, freeze and start again: the local broker and Apache Kafka from jars."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_node import KafkaNode, free_port
from headrace.schemas.config import KafkaConfig

LIBS = "HEADRACE_KAFKA_LIBS"


class Server:
    """One broker on a data folder, at one address over all its lives."""

    name = ""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = free_port()
        self.bootstrap = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> subprocess.Popen[bytes]:
        raise NotImplementedError

    def start(self) -> None:
        """Start and wait until it answers."""
        self._process = self.launch()
        Connection.of(KafkaConfig(), "probe", self.bootstrap).wait_for_broker(120)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> None:
        """End it with SIGTERM, and wait for it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def try_start(self, seconds: float) -> None:
        """Start it where it may not be able to run, and leave it alone for so long."""
        with contextlib.suppress(Exception):
            self._process = self.launch()
            self._process.wait(seconds)

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

    def launch(self) -> subprocess.Popen[bytes]:
        log = os.open(self.data.parent / f"{self.data.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        command = [
            sys.executable,
            "-m",
            "headrace.connectors.broker",
            "--data",
            str(self.data),
            "--port",
            str(self.port),
        ]
        try:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        finally:
            os.close(log)


class ApacheKafka(Server):
    """Apache Kafka from jars, one KRaft node."""

    name = "kafka"

    def launch(self) -> subprocess.Popen[bytes]:
        return KafkaNode(Path(os.environ[LIBS]), self.data, self.port, heap="384m").process


SERVERS: dict[str, type[Server]] = {"local": LocalBroker, "kafka": ApacheKafka}
