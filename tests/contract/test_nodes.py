"""Kafka that outlives the command which started it, and a worker that outlives one of three nodes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from tiny_run import headrace
from toy_worker import PARTITIONS, check_chain, feed, wait_for_chain

from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_cluster import Cluster, Plan
from headrace.connectors.kafka_jars import LIBS_VARIABLE, find_java
from headrace.connectors.kafka_node import free_port
from headrace.connectors.processes import command_of, is_free
from headrace.schemas.config import KafkaConfig
from headrace.schemas.topics import partition_counts

if not os.environ.get(LIBS_VARIABLE):
    pytest.skip(f"nodes of Kafka from jars: set {LIBS_VARIABLE} (Java 17)", allow_module_level=True)

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(900)]
LIBS = Path(os.environ[LIBS_VARIABLE])


def three_free_ports() -> int:
    """The first of three ports in a row that nobody uses, below those that the system gives to outgoing connections."""
    while True:
        first = random.randrange(20_000, 31_000, 3)
        if all(is_free(port) for port in range(first, first + 3)):
            return first


def one_node(folder: Path, *words: str, port: int = 0) -> subprocess.CompletedProcess[str]:
    options = ("--port", str(port), "--heap", "384m") if port else ()
    return headrace("kafka", *words, "--folder", str(folder), *options)


def test_up_outlives_its_command_and_is_idempotent_and_down_ends_only_its_own(tmp_path: Path) -> None:
    folder, port = tmp_path / "kafka", free_port()
    assert one_node(folder, "status").returncode == 78
    try:
        up = one_node(folder, "up", "--format", "json", port=port)
        assert up.returncode == 0, up.stdout
        assert json.loads(up.stdout)["started"] == [1]
        Connection.of(KafkaConfig(), "probe", f"127.0.0.1:{port}").wait_for_broker(60)
        again = one_node(folder, "up", "--format", "json", port=port)
        assert json.loads(again.stdout)["started"] == [], "a running node was started again"
        other = one_node(folder, "up", "--nodes", "3", port=port)
        assert other.returncode == 78 and "holds a cluster with 1 plain node" in other.stdout
        stranger = one_node(tmp_path / "second", "up", port=port)
        assert stranger.returncode == 78
        assert f"port {port} of 127.0.0.1 is taken by pid" in stranger.stdout and "--port" in stranger.stdout

        (state,) = json.loads(one_node(folder, "status", "--format", "json").stdout)["nodes"]
        os.kill(state["pid"], signal.SIGKILL)
        _wait_gone(state["pid"])
        stopped = one_node(folder, "status")
        assert stopped.returncode == 1
        _down_spares_whoever_has_the_old_pid(folder)
        assert json.loads(one_node(folder, "up", "--format", "json", port=port).stdout)["started"] == [1]
        (state,) = json.loads(one_node(folder, "status", "--format", "json").stdout)["nodes"]
    finally:
        down = one_node(folder, "down", "--delete")
    assert "ended node 1" in down.stdout
    assert command_of(state["pid"]) == "" and is_free(port) and not folder.exists()
    assert "nothing ran" in one_node(folder, "down").stdout


def _down_spares_whoever_has_the_old_pid(folder: Path) -> None:
    """The pid of a dead node now belongs to somebody else, as happens after a reboot."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True) as innocent:
        (folder / "node-1" / "pid").write_text(str(innocent.pid))
        assert one_node(folder, "status").returncode == 1
        assert "nothing ran" in one_node(folder, "down").stdout
        assert innocent.poll() is None, "a process that is none of ours was ended"
        innocent.kill()


def _wait_gone(pid: int) -> None:
    end = time.monotonic() + 30
    while command_of(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert command_of(pid) == ""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("nodes") / "kafka")
    try:
        made.up(Plan(nodes=3, port=three_free_ports()), find_java(), LIBS, heap="256m", test=True)
        yield made
    finally:
        made.down(delete=True)


class KeptWorker:
    """The toy worker as a process that is started again when it ends, as by the launcher; it writes to ``log``."""

    def __init__(self, connection: Connection, log: Path) -> None:
        self._log = log
        toy = Path(__file__).parents[1] / "kit" / "toy_worker.py"
        self._command = [sys.executable, str(toy), connection.bootstrap, connection.run, "a"]
        self._over = threading.Event()
        self.codes: list[int] = []
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _keep(self) -> None:
        while not self._over.is_set():
            with (
                self._log.open("ab") as log,
                subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stderr=log) as process,
            ):
                while process.poll() is None and not self._over.wait(0.1):
                    continue
                if self._over.is_set():
                    process.send_signal(signal.SIGTERM)
                self.codes.append(process.wait(60))

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def test_a_worker_goes_on_when_the_node_that_coordinates_its_group_is_killed(nodes: Cluster, tmp_path: Path) -> None:
    """The client library may hang in a transaction that it began with the dead coordinator: then the watchdog ends the
    process, and the next one goes on from the last commit.
    """
    run = f"toy-{uuid.uuid4().hex[:8]}"
    connection = Connection.of(KafkaConfig(replication_factor=3), run, nodes.bootstrap()).patient(lambda: False)
    connection.ensure_topics(partition_counts(["main"], groups=PARTITIONS, inboxes=1, lanes=1))
    numbers = range(300)
    worker = KeptWorker(connection, tmp_path / "worker.log")
    feeder = threading.Thread(target=feed, args=(connection, numbers[50:200], 0.02))
    try:
        feed(connection, numbers[:50])
        wait_for_chain(connection, 50, 240)
        dead = _coordinator(connection, f"{run}.assemble")
        pid = nodes.status()[dead - 1].pid
        feeder.start()
        wait_for_chain(connection, 60, 240)
        os.kill(pid, signal.SIGKILL)
        _wait_gone(pid)
        feed(connection, numbers[200:])  # what comes after its death is worked on too
        feeder.join()
        check_chain(wait_for_chain(connection, len(numbers), 240), numbers)
    except AssertionError:
        print((tmp_path / "worker.log").read_text("utf-8")[-20_000:])
        raise
    finally:
        worker.stop()
    assert len(worker.codes) <= 3, f"the worker ended again and again: {worker.codes}"


def _coordinator(connection: Connection, group: str) -> int:
    """The node that coordinates a consumer group."""
    end = time.monotonic() + 120
    while True:
        (future,) = connection.admin().describe_consumer_groups([group], request_timeout=30).values()
        try:
            return int(future.result(40).coordinator.id)
        except KafkaException:  # it is being chosen
            assert time.monotonic() < end, f"nobody coordinates {group}"
            time.sleep(0.5)
