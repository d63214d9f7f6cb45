"""Exactly once under faults, on the local broker and on Apache Kafka: what is killed, frozen or succeeded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_servers import LIBS, SERVERS, Server
from toy_worker import Chain, chain_of, check_chain, feed, make_run, running, wait_for_chain

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.pipeline.runtime.worker import Worker
from headrace.schemas.errors import EXIT_SUPERSEDED, Superseded

TOY = Path(__file__).parents[1] / "kit" / "toy_worker.py"
SHORT = {"transaction.timeout.ms": "3000"}


KINDS = ["local", *([pytest.param("kafka", marks=pytest.mark.kafka)] if os.environ.get(LIBS) else [])]


@pytest.fixture(params=KINDS, scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A broker of this module's own, because its tests kill it."""
    server = SERVERS[request.param](tmp_path_factory.mktemp(request.param) / "broker")
    server.start()
    yield server
    server.kill()


def start(connection: Connection, instance: str, settings: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    options = [f"{k}={v}" for k, v in (settings or {}).items()]
    return subprocess.Popen(
        [sys.executable, str(TOY), connection.bootstrap, connection.run, instance, *options],
        stdin=subprocess.DEVNULL,
        stderr=open(f"/tmp/toy-{connection.run}.log", "ab") if "TOY_LOG" in os.environ else subprocess.DEVNULL,
    )


def test_kill_9_of_the_worker_loses_and_repeats_nothing(server: Server) -> None:
    _, connection = make_run(server.bootstrap)
    numbers = range(1500)
    feeder = threading.Thread(target=feed, args=(connection, numbers, 0.004))
    feeder.start()
    for pause in (2.0, 1.6, 2.2):
        process = start(connection, "a")
        time.sleep(pause)
        process.kill()
        process.wait()
    last = start(connection, "a")
    try:
        feeder.join()
        check_chain(wait_for_chain(connection, len(numbers)), numbers)
    finally:
        last.send_signal(signal.SIGTERM)
        assert last.wait(20) == 0


def test_kill_9_of_the_broker_loses_and_repeats_nothing(server: Server) -> None:
    config, connection = make_run(server.bootstrap)
    numbers = range(1500)
    stop = StopSignal()
    with running(Worker(connection, config, "assemble", "a", Chain, stop=stop), stop) as errors:
        feeder = threading.Thread(target=feed, args=(connection, numbers, 0.008))
        feeder.start()
        for done in (30, 400):
            wait_for_chain(connection, done)
            server.kill()
            time.sleep(0.5)
            server.start()
        feeder.join()
        check_chain(wait_for_chain(connection, len(numbers)), numbers)
    assert not errors, "an outage ends nothing"


def test_a_broker_frozen_beyond_the_transaction_timeout_costs_only_time(server: Server) -> None:
    config, connection = make_run(server.bootstrap, SHORT)
    numbers = range(1000)
    stop = StopSignal()
    worker = Worker(connection, config, "assemble", "a", Chain, stop=stop)
    with running(worker, stop) as errors:
        feeder = threading.Thread(target=feed, args=(connection, numbers, 0.004))
        feeder.start()
        wait_for_chain(connection, 50)
        server.freeze(6.0)
        feeder.join()
        check_chain(wait_for_chain(connection, len(numbers)), numbers)
    assert not errors, "a frozen broker looks like a successor, and is none"


def test_a_successor_of_the_same_name_takes_over(server: Server) -> None:
    config, connection = make_run(server.bootstrap)
    numbers = range(1200)
    feeder = threading.Thread(target=feed, args=(connection, numbers, 0.004))
    first, second = StopSignal(), StopSignal()
    with running(Worker(connection, config, "assemble", "a", Chain, stop=first), first) as ended:
        feeder.start()
        wait_for_chain(connection, 50)
        with running(Worker(connection, config, "assemble", "a", Chain, stop=second), second) as errors:
            feeder.join()
            check_chain(wait_for_chain(connection, len(numbers)), numbers)
        assert not errors
    assert [type(e) for e in ended] == [Superseded]
    assert EXIT_SUPERSEDED == 75


def test_a_frozen_worker_that_wakes_changes_nothing(server: Server) -> None:
    """Another instance takes the tasks after the session; the zombie's open transaction is fenced by the generation."""
    _, connection = make_run(server.bootstrap)
    numbers = range(2000)
    feeder = threading.Thread(target=feed, args=(connection, numbers, 0.007))
    zombie = start(connection, "a")
    time.sleep(1.5)
    feeder.start()
    time.sleep(1.5)
    other = start(connection, "b")
    time.sleep(1.0)
    os.kill(zombie.pid, signal.SIGSTOP)
    time.sleep(9.0)
    os.kill(zombie.pid, signal.SIGCONT)
    try:
        feeder.join()
        check_chain(wait_for_chain(connection, len(numbers), 40), numbers)
    finally:
        for process in (zombie, other):
            process.kill()
            process.wait()


def test_restart_under_the_same_name_is_quick(server: Server) -> None:
    _, connection = make_run(server.bootstrap)
    process = start(connection, "a")
    feed(connection, range(100))
    wait_for_chain(connection, 100)
    process.kill()
    process.wait()
    feed(connection, range(100, 104))
    began = time.monotonic()
    process = start(connection, "a")
    try:
        while len(chain_of(connection)) < 104:
            assert time.monotonic() - began < 60.0
            time.sleep(0.05)
        print(f"first record {time.monotonic() - began:.2f} s after the start of the process")
    finally:
        process.kill()
        process.wait()
