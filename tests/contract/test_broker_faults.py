"""A broker that is away, killed inside a transaction, frozen inside one, or out of disk: runs go on by themselves.

Each on the local broker and on Apache Kafka. What is folded twice, lost or half done breaks the chain of numbers that
the toy stage writes. HEADRACE_LONG_FAULTS=1 takes the outages of a cluster (60 s, 15 s) and the settings as shipped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from fault_kit import LONG, SCALED, Inside, fill, small_disk
from runtime_servers import LIBS, SERVERS, Server
from toy_worker import Chain, check_chain, feed, make_run, running, toy, wait_for_chain

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.transaction import ProducerLost, Transaction, TransactionAborted, Watchdog
from headrace.pipeline.runtime.worker import Worker
from headrace.schemas.codec import encode
from headrace.schemas.records import Failed

KINDS = ["local", *([pytest.param("kafka", marks=pytest.mark.kafka)] if os.environ.get(LIBS) else [])]
pytestmark = pytest.mark.timeout(600)
DISK_MEGABYTES = {"local": 64, "kafka": 512}


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A broker of this module's own, because its tests stop it."""
    server = SERVERS[kind](tmp_path_factory.mktemp(kind) / "broker")
    server.start()
    yield server
    server.kill()


def test_a_broker_that_is_stopped_for_long_costs_only_time(server: Server) -> None:
    """Longer than the session and the transaction timeout: members are forgotten, transactions ended."""
    config, connection = make_run(server.bootstrap, SCALED)
    numbers = range(600)
    stop = StopSignal()
    with running(Worker(connection, config, "assemble", "a", Chain, stop=stop), stop) as errors:
        feeder = threading.Thread(target=feed, args=(connection, numbers, 0.004))
        feeder.start()
        wait_for_chain(connection, 50)
        server.terminate()
        time.sleep(60.0 if LONG else 3.0)
        server.start()
        feeder.join()
        check_chain(wait_for_chain(connection, len(numbers), 120), numbers)
    assert not errors, "an outage ends no part"


def test_a_broker_frozen_inside_a_transaction_repeats_nothing(server: Server) -> None:
    config, connection = make_run(server.bootstrap, SCALED)
    numbers = range(600)
    stop = StopSignal()
    stage = Inside.at(150)
    with running(Worker(connection, config, "assemble", "a", stage, stop=stop), stop) as errors:
        feeder = threading.Thread(target=feed, args=(connection, numbers, 0.004))
        feeder.start()
        assert stage.reached.wait(60)
        server.freeze(15.0 if LONG else 3.0)
        feeder.join()
        check_chain(wait_for_chain(connection, len(numbers), 120), numbers)
    assert not errors


def transaction_of(connection: Connection) -> Transaction:
    """A new producer of the same transactional id, after its rules: init, then the sweep."""
    group = connection.consumer("probe", f"{connection.run}.probe")
    places = [(connection.topic("groups"), 0), (connection.topic("ledger"), 0)]
    while True:
        producer = connection.producer("probe", f"{connection.run}.probe")
        transaction = Transaction(producer, Watchdog(connection.answers), lambda: False)
        try:
            transaction.initialise()
            offset = TopicPartition(connection.topic("admissions"), 0, 0)
            transaction.sweep(places, offset, group.consumer_group_metadata())
        except (ProducerLost, TransactionAborted):
            transaction.discard()
            continue
        group.close()
        return transaction


def put(transaction: Transaction, connection: Connection, number: int) -> None:
    """One record to two topics, acknowledged."""
    for topic in ("groups", "ledger"):
        transaction.produce(connection.topic(topic), encode(toy(number)), 0)
    assert not transaction._producer.flush(30), "acknowledged: it lies in the log"


def numbers_in(connection: Connection, topic: str) -> list[int]:
    return [r.group for raw in connection.read_topic(topic) if isinstance(r := raw.decoded(), Failed)]


@pytest.mark.parametrize("ended", ["open", "aborted"])
def test_a_broker_killed_inside_a_transaction_never_shows_what_was_aborted(server: Server, ended: str) -> None:
    """Neither what was open when the broker died, nor what was aborted just before (Apache Kafka may forget that)."""
    _, connection = make_run(server.bootstrap, SCALED)
    transaction = transaction_of(connection)
    put(transaction, connection, 1)
    transaction.commit([], None)
    put(transaction, connection, 666)
    if ended == "aborted":
        transaction.abort()
    server.kill()
    server.start()
    transaction.discard()
    for number in (2, 3):
        transaction = transaction_of(connection)
        put(transaction, connection, number)
        transaction.commit([], None)
    transaction.discard()
    for topic in ("groups", "ledger"):
        assert numbers_in(connection, topic) == [1, 2, 3]


def test_a_full_disk_stops_the_run_until_there_is_room(kind: str, tmp_path: Path) -> None:
    """The broker's disk fills up under load; it dies or refuses, is started in vain, then there is room."""
    try:
        with small_disk(tmp_path / "disk", DISK_MEGABYTES[kind]) as disk:
            _survive_full_disk(SERVERS[kind](disk / "broker"), disk)
    except PermissionError as error:
        pytest.skip(f"no disk of its own can be mounted here: {error}")


def _survive_full_disk(server: Server, disk: Path) -> None:
    server.start()
    config, connection = make_run(server.bootstrap, {})
    numbers = range(400)
    stop = StopSignal()
    try:
        with (
            running(Worker(connection, config, "assemble", "a", Chain, stop=stop), stop) as errors,
            ThreadPoolExecutor(2) as feeders,
        ):
            feeder = feeders.submit(feed, connection, range(200))
            wait_for_chain(connection, 20)
            filler = fill(disk)
            more = feeders.submit(feed, connection, range(200, 400), 0.002)
            time.sleep(2.0)
            server.kill()
            server.try_start(2.0)
            filler.unlink()
            server.kill()
            server.start()
            feeder.result()
            more.result()
            out = wait_for_chain(connection, len(numbers), 300)
            assert not errors
            check_chain(out, numbers)
        assert not errors
    finally:
        server.kill()
