"""The connector against a broker: topics, reading to the end, and errors that name what happened."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import TopicPartition

from headrace.connectors.kafka import MAX_MESSAGE_BYTES, Connection
from headrace.connectors.kafka_errors import BrokerUnreachable, MissingTopic, WrongPartitionCount
from headrace.connectors.kafka_node import free_port
from headrace.schemas.config import KafkaConfig
from headrace.schemas.errors import ConfigurationError, RecordTooLarge
from headrace.schemas.topics import partition_counts


@pytest.fixture
def connection(bootstrap: str) -> Iterator[Connection]:
    connection = Connection.of(KafkaConfig(), f"conn-{uuid.uuid4().hex[:8]}", bootstrap)
    connection.wait_for_broker(30)
    yield connection
    connection.delete_run_topics()


def write(connection: Connection, topic: str, values: list[bytes], partition: int = 0) -> None:
    producer = connection.producer("writer", linger_ms=0)
    for value in values:
        connection.produce(producer, topic, value, partition=partition, key=b"k", headers=[("h", b"1")])
    assert producer.flush(20) == 0


def test_topics_are_created_once_whoever_races(connection: Connection) -> None:
    counts = partition_counts(["main"], groups=4, inboxes=8, lanes=2)
    created: list[str] = []
    threads = [threading.Thread(target=lambda: created.extend(connection.ensure_topics(counts))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(created) == set(counts)
    assert connection.list_run_topics() == counts
    assert connection.ensure_topics(counts) == []


def test_another_partition_count_is_refused_by_name(connection: Connection) -> None:
    connection.ensure_topics({"prompts": 1, "groups": 2})
    with pytest.raises(WrongPartitionCount, match=f"{connection.run}.groups has 2, wanted 3"):
        connection.ensure_topics({"prompts": 1, "groups": 3})
    assert issubclass(WrongPartitionCount, ConfigurationError)


def test_delete_takes_the_run_and_nothing_else(connection: Connection, bootstrap: str) -> None:
    other = Connection.of(KafkaConfig(), f"{connection.run}-2", bootstrap)
    for one in (connection, other):
        one.ensure_topics({"prompts": 1, "demand": 1})
    try:
        assert connection.delete_run_topics() == ["demand", "prompts"]
        assert connection.list_run_topics() == {}
        assert other.list_run_topics() == {"demand": 1, "prompts": 1}
    finally:
        other.delete_run_topics()


def test_read_topic_gives_every_committed_record_with_its_place(connection: Connection) -> None:
    connection.ensure_topics({"ledger": 2})
    write(connection, "ledger", [b"a", b"b"], 0)
    write(connection, "ledger", [b"c"], 1)
    producer = connection.producer("txn", f"{connection.run}.txn.a")
    producer.init_transactions(30)
    for value, end in ((b"aborted", producer.abort_transaction), (b"d", producer.commit_transaction)):
        producer.begin_transaction()
        connection.produce(producer, "ledger", value, partition=0)
        producer.flush(10)
        end(30)
    # Kafka writes a transaction's marker after the commit has returned; until then its records are not to be seen
    deadline = time.monotonic() + 30
    while len(records := list(connection.read_topic("ledger"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sorted((r.partition, r.offset, r.value) for r in records) == [
        (0, 0, b"a"), (0, 1, b"b"), (0, 4, b"d"), (1, 0, b"c"),
    ]  # fmt: skip
    assert str(records[0].source).startswith("ledger[")
    assert next(r for r in records if r.value == b"a").headers == [("h", b"1")]
    assert abs(records[0].timestamp_ms - time.time() * 1000) < 60_000
    assert [r.value for r in connection.read_topic("ledger", {0: 1})] == [b"b", b"d"]
    assert connection.end_offsets("ledger") == {0: 6, 1: 1}


def test_reading_ends_at_the_last_stable_offset_seen_at_the_start(connection: Connection) -> None:
    connection.ensure_topics({"ledger": 1})
    write(connection, "ledger", [b"a"])
    producer = connection.producer("txn", f"{connection.run}.txn.a")
    producer.init_transactions(30)
    producer.begin_transaction()
    connection.produce(producer, "ledger", b"open", partition=0)
    producer.flush(10)
    assert connection.end_offsets("ledger") == {0: 1}
    assert connection.end_offsets("ledger", committed=False) == {0: 2}
    reading = connection.read_topic("ledger")
    assert next(reading).value == b"a"
    write(connection, "ledger", [b"later"])
    assert list(reading) == []
    producer.abort_transaction(30)


def test_reading_starts_at_what_is_still_kept(connection: Connection) -> None:
    connection.ensure_topics({"ledger": 1})
    write(connection, "ledger", [b"a", b"b", b"c"])
    place = TopicPartition(connection.topic("ledger"), 0, 2)
    connection.admin().delete_records([place])[place].result(10)
    assert connection.start_offsets("ledger") == {0: 2}
    assert [r.value for r in connection.read_topic("ledger")] == [b"c"]
    assert [r.value for r in connection.read_topic("ledger", {0: 0})] == [b"c"]


def test_a_missing_topic_is_named(connection: Connection) -> None:
    with pytest.raises(MissingTopic, match=f"{connection.run}.prompts does not exist"):
        list(connection.read_topic("prompts"))


def test_records_up_to_the_limit_travel_and_larger_ones_are_refused_by_name(connection: Connection) -> None:
    connection.ensure_topics({"trajectories": 1})
    largest = bytes(MAX_MESSAGE_BYTES - (64 << 10))
    write(connection, "trajectories", [largest])
    assert [len(r.value or b"") for r in connection.read_topic("trajectories")] == [len(largest)]
    with pytest.raises(RecordTooLarge, match=rf"{connection.run}\.trajectories\[0\].*offload"):
        write(connection, "trajectories", [bytes(MAX_MESSAGE_BYTES + 1)])


def test_no_broker_is_said_with_address_and_reason() -> None:
    port = free_port()
    connection = Connection.of(KafkaConfig(), "run", f"127.0.0.1:{port}")
    with pytest.raises(BrokerUnreachable, match=rf"127\.0\.0\.1:{port} within 1 s: .*refused"):
        connection.wait_for_broker(1.0)
    assert not connection.answers(0.2)


def test_a_second_producer_of_a_name_fences_the_first(connection: Connection) -> None:
    from headrace.connectors.transaction import ProducerLost, Transaction, Watchdog

    connection.ensure_topics({"ledger": 1})
    watchdog = Watchdog(connection.answers)

    def transaction() -> Transaction:
        producer = connection.producer("txn", f"{connection.run}.txn.a")
        made = Transaction(producer, watchdog, lambda: False)
        made.initialise()
        return made

    first = transaction()
    first.produce(connection.topic("ledger"), b"first", 0)
    second = transaction()
    second.produce(connection.topic("ledger"), b"second", 0)
    second.commit([], None)
    with pytest.raises(ProducerLost):
        first.commit([], None)
    first.discard()
    assert [r.value for r in connection.read_topic("ledger")] == [b"second"]
