"""Transactions as a producer and a reader see them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from batch_maker import batch_of_now
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from kafka_kit import Kit, unique, wait_until
from raw_kafka import RawClient

from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.wire import Writer


def test_commit_shows_abort_hides_open_waits(kit: Kit) -> None:
    topic = kit.topic()
    producer = kit.transactional()
    for values, commit in (([b"c1", b"c2"], True), ([b"a1", b"a2"], False), ([b"c3"], True)):
        producer.begin_transaction()
        assert kit.send(topic, values, producer=producer) == []
        if commit:
            producer.commit_transaction(15)
        else:
            producer.abort_transaction(15)
    producer.begin_transaction()
    kit.send(topic, [b"open"], producer=producer)
    assert kit.values(topic, check_crcs=True) == [b"c1", b"c2", b"c3"]
    everything = [b"c1", b"c2", b"a1", b"a2", b"c3", b"open"]
    assert kit.values(topic, isolation_level="read_uncommitted") == everything
    assert [m.offset() for m in kit.read(topic)] == [0, 1, 6]
    producer.commit_transaction(15)
    assert kit.values(topic) == [b"c1", b"c2", b"c3", b"open"]
    assert kit.watermarks(topic) == (0, 10)


def test_a_transaction_ends_everywhere_at_once(kit: Kit) -> None:
    topics = [kit.topic(partitions=3) for _ in range(2)]
    producer = kit.transactional()
    producer.begin_transaction()
    for topic in topics:
        for partition in range(3):
            kit.send(topic, [b"x"], partition=partition, producer=producer)
    assert [kit.values(topic, 3) for topic in topics] == [[], []]
    producer.commit_transaction(15)
    assert [len(kit.values(topic, 3)) for topic in topics] == [3, 3]


def test_data_behind_an_open_transaction_waits_for_its_end(kit: Kit) -> None:
    topic = kit.topic()
    producer = kit.transactional()
    producer.begin_transaction()
    kit.send(topic, [b"first"], producer=producer)
    kit.send(topic, [b"plain"])
    assert kit.values(topic) == []
    producer.abort_transaction(15)
    assert kit.values(topic) == [b"plain"]


def test_an_abandoned_transaction_is_aborted_after_its_timeout(kit: Kit) -> None:
    topic = kit.topic()
    producer = kit.transactional(transaction_timeout_ms=2000, message_timeout_ms=2000, socket_timeout_ms=2000)
    producer.begin_transaction()
    kit.send(topic, [b"ghost"], producer=producer)
    kit.send(topic, [b"after"])
    assert kit.values(topic) == []
    wait_until(lambda: kit.values(topic) == [b"after"], 15)
    with pytest.raises(KafkaException) as caught:
        producer.commit_transaction(10)
    assert caught.value.args[0].code() in {KafkaError._FENCED, KafkaError._STATE, KafkaError.INVALID_PRODUCER_EPOCH}


def test_a_zombie_is_fenced_and_its_data_hidden(kit: Kit) -> None:
    topic, name = kit.topic(), unique("id")
    zombie = kit.transactional(name)
    zombie.begin_transaction()
    kit.send(topic, [b"zombie"], producer=zombie)
    heir = kit.transactional(name)
    with pytest.raises(KafkaException) as caught:
        zombie.commit_transaction(15)
    assert caught.value.args[0].code() == KafkaError._FENCED
    heir.begin_transaction()
    kit.send(topic, [b"heir"], producer=heir)
    heir.commit_transaction(15)
    assert kit.values(topic) == [b"heir"]


def test_offsets_commit_with_the_transaction_only(kit: Kit) -> None:
    source, sink, group = kit.topic(), kit.topic(), unique("group")
    kit.send(source, [b"%d" % i for i in range(10)])
    consumer = kit.consumer(group)
    consumer.subscribe([source])
    wait_until(lambda: consumer.poll(0.5), 20)
    producer = kit.transactional()

    def attempt(offset: int) -> None:
        producer.begin_transaction()
        kit.send(sink, [b"%d" % offset], producer=producer)
        position = TopicPartition(source, 0, offset, metadata="note")
        producer.send_offsets_to_transaction([position], consumer.consumer_group_metadata(), 15)

    attempt(5)
    producer.abort_transaction(15)
    assert kit.committed(group, source) < 0
    attempt(10)
    producer.commit_transaction(15)
    assert kit.committed(group, source) == 10
    assert kit.values(sink) == [b"10"]


def test_offsets_of_a_past_member_are_refused(kit: Kit) -> None:
    source, group = kit.topic(), unique("group")
    producer = kit.transactional()
    past = kit.consumer(group)
    past.subscribe([source])
    wait_until(lambda: past.poll(0.1) is None and past.assignment(), 20)
    metadata = past.consumer_group_metadata()
    past.close()
    producer.begin_transaction()
    with pytest.raises(KafkaException) as caught:
        producer.send_offsets_to_transaction([TopicPartition(source, 0, 1)], metadata, 15)
    assert caught.value.args[0].code() in {KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION}
    producer.abort_transaction(15)


def test_a_reader_of_stable_offsets_waits_for_the_transaction(kit: Kit) -> None:
    topic, group, name = kit.topic(), unique("group"), unique("id")
    kit.consumer(group).commit(offsets=[TopicPartition(topic, 0, 3)], asynchronous=False)
    with RawClient(kit.bootstrap) as client:
        producer = wait_until(lambda: client.init_producer(name))
        wait_until(lambda: client.add_offset(name, producer, group, topic, 9) is Code.NONE)
        assert client.fetch_offset(group, topic, stable=True)[1] is Code.UNSTABLE_OFFSET_COMMIT
        assert client.fetch_offset(group, topic, stable=False) == (3, Code.NONE)
        assert client.end_transaction(name, producer, commit=True) is Code.NONE
        wait_until(lambda: client.fetch_offset(group, topic, stable=True) == (9, Code.NONE))


def test_ends_that_nobody_may_call(kit: Kit) -> None:
    name = unique("id")
    with RawClient(kit.bootstrap) as client:
        producer = client.init_producer(name)
        assert client.end_transaction(name, producer, commit=True) is Code.INVALID_TXN_STATE
        newer = client.init_producer(name)
        assert newer[0] == producer[0] and newer[1] > producer[1]
        assert client.end_transaction(name, producer, commit=True) is Code.INVALID_PRODUCER_EPOCH
        assert client.end_transaction(name, (producer[0] + 10_000, 0), True) is Code.INVALID_PRODUCER_ID_MAPPING


def _add_partition(client: RawClient, name: str, producer: tuple[int, int], topic: str) -> Code:
    def body(out: Writer) -> None:
        out.string(name)
        out.int64(producer[0])
        out.int16(producer[1])
        out.length(1)
        out.string(topic)
        out.array([0], out.int32)

    reader = client.request(Api.ADD_PARTITIONS_TO_TXN, 0, body)
    reader.int32()
    reader.int32()
    reader.string()
    reader.int32()
    reader.int32()
    return Code(reader.int16())


def test_a_batch_outside_of_a_transaction_is_refused(kit: Kit) -> None:
    topic, name = kit.topic(), unique("id")
    with RawClient(kit.bootstrap) as client:
        producer = client.init_producer(name)
        batch = batch_of_now(1, producer, 0, True)
        assert client.produce(topic, batch, name)[0] is Code.INVALID_TXN_STATE
        wait_until(lambda: _add_partition(client, name, producer, topic) is Code.NONE)
        assert client.produce(topic, batch, name) == (Code.NONE, 0)
        assert client.end_transaction(name, producer, commit=True) is Code.NONE
        wait_until(lambda: kit.values(topic) == [b"v"])
        assert client.end_transaction(name, producer, commit=True) is Code.NONE
        assert client.end_transaction(name, producer, commit=False) is Code.INVALID_TXN_STATE


def test_a_zombie_that_writes_is_refused(kit: Kit) -> None:
    topic, name = kit.topic(), unique("id")
    with RawClient(kit.bootstrap) as client:
        zombie = client.init_producer(name)
        wait_until(lambda: _add_partition(client, name, zombie, topic) is Code.NONE)
        assert client.produce(topic, batch_of_now(1, zombie, 0, True), name) == (Code.NONE, 0)
        heir = wait_until(lambda: client.init_producer(name))
        assert heir[1] > zombie[1]
        code, _ = client.produce(topic, batch_of_now(1, zombie, 1, True), name)
        assert code is Code.INVALID_PRODUCER_EPOCH
    assert kit.values(topic) == []


def test_a_long_row_of_short_transactions(kit: Kit) -> None:
    """Two hundred commits and aborts, each seen by a waiting reader as it should be."""
    topic = kit.topic(partitions=4)
    reader = kit.consumer(isolation_level="read_committed")
    reader.assign([TopicPartition(topic, partition, 0) for partition in range(4)])
    producer = kit.transactional()
    sent: list[bytes] = []
    got: list[Any] = []
    start = time.monotonic()
    for number in range(100):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number, partition=number % 4)
        if number % 3 == 0:
            producer.flush()
            producer.abort_transaction(15)
        else:
            producer.commit_transaction(15)
            sent.append(b"%d" % number)
    while len(got) < len(sent):
        message = reader.poll(5)
        assert message is not None, f"{len(got)} of {len(sent)} after {time.monotonic() - start:.1f} s"
        got.append(message.value())
    assert sorted(got) == sorted(sent)
