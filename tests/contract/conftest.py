"""One suite, two brokers: `bootstrap` is the local broker, then Apache Kafka where it can be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
from kafka_kit import Kit

from headrace.connectors.kafka_node import KafkaNode, free_port

LIBS, CLUSTER = "HEADRACE_KAFKA_LIBS", "HEADRACE_KAFKA_BOOTSTRAP"
HAVE_KAFKA = bool(os.environ.get(LIBS) or os.environ.get(CLUSTER))
KINDS = ["local", *([pytest.param("kafka", marks=pytest.mark.kafka)] if HAVE_KAFKA else [])]


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which broker a test runs on: `local` or `kafka`."""
    return str(request.param)


@contextmanager
def started(kind: str, data: Path) -> Iterator[str]:
    """The address of a broker of this kind, which is ended afterwards."""
    if kind == "kafka":
        if os.environ.get(CLUSTER):
            yield os.environ[CLUSTER]
            return
        node = KafkaNode(Path(os.environ[LIBS]), data, free_port())
        try:
            node.wait_ready()
            yield node.bootstrap
        finally:
            node.stop()
        return
    command = [sys.executable, "-m", "headrace.connectors.broker", "--data", str(data), "--port", "0"]
    process = subprocess.Popen([*command, "--exit-with-parent"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("ready "))
        yield f"127.0.0.1:{line.split()[1]}"
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture(scope="session")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Starts each kind of broker once, when it is first asked for, whatever order the tests come in."""
    with ExitStack() as stack:
        yield cache(lambda kind: stack.enter_context(started(kind, tmp_path_factory.mktemp(kind))))


@pytest.fixture(scope="session")
def bootstrap(kind: str, brokers: Callable[[str], str]) -> str:
    """Address of the broker under test, shared by the session."""
    return brokers(kind)


@pytest.fixture
def kit(bootstrap: str, kind: str) -> Iterator[Kit]:
    """Clients of the broker under test."""
    kit = Kit(bootstrap, kind)
    yield kit
    kit.close()
