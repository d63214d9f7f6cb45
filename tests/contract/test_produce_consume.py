"""What goes in comes out: keys, headers, times, sizes, codecs, offsets."""

from __future__ import annotations

import os
import threading
import time

import pytest
from confluent_kafka import OFFSET_END, Consumer, KafkaError, TopicPartition
from kafka_kit import Kit, unique, wait_until

NOW = int(time.time() * 1000)


def test_keys_values_headers_and_times_travel(kit: Kit) -> None:
    topic = kit.topic()
    headers = [("a", b"1"), ("binary", bytes(range(256))), ("none", None), ("a", b"2")]
    keys = [b"k\x00\xff", b"k", None]
    assert kit.send(topic, [b"v", None, b""], keys, headers=headers, timestamp=NOW - 5000) == []
    found = kit.read(topic)
    assert [m.value() for m in found] == [b"v", None, b""]
    assert [m.key() for m in found] == keys
    assert [m.offset() for m in found] == [0, 1, 2]
    assert found[0].headers() == headers
    assert found[0].timestamp() == (1, NOW - 5000)


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_travels(kit: Kit, codec: str) -> None:
    topic = kit.topic()
    values = [b"%06d" % i * 300 for i in range(100)]
    assert kit.send(topic, values, producer=kit.producer(compression_type=codec, linger_ms=20)) == []
    assert kit.values(topic, check_crcs=True) == values


def test_large_records_travel_where_the_topic_allows_them(kit: Kit) -> None:
    topic = kit.topic(max_message_bytes=30_000_000)
    big = os.urandom(12 << 20)
    producer = kit.producer(message_max_bytes=30_000_000)
    assert kit.send(topic, [big, b"after"], producer=producer) == []
    found = kit.values(topic, fetch_message_max_bytes=1 << 20, receive_message_max_bytes=100 << 20)
    assert found == [big, b"after"]


def test_a_record_over_the_topics_limit_is_refused(kit: Kit) -> None:
    topic = kit.topic()
    producer = kit.producer(message_max_bytes=30_000_000)
    assert kit.send(topic, [os.urandom(3 << 20)], producer=producer) == ["MSG_SIZE_TOO_LARGE"]
    assert kit.watermarks(topic) == (0, 0)


def test_order_holds_with_an_idempotent_producer(kit: Kit) -> None:
    topic = kit.topic()
    values = [b"%d" % i for i in range(5000)]
    assert kit.send(topic, values, producer=kit.producer(enable_idempotence=True)) == []
    assert kit.values(topic) == values


def test_positions_inside_batches_and_at_the_end(kit: Kit) -> None:
    topic = kit.topic()
    kit.send(topic, [b"%d" % i for i in range(100)], producer=kit.producer(linger_ms=50, batch_num_messages=7))
    assert kit.values(topic, start=37)[0] == b"37"
    assert kit.values(topic, start=100) == []
    consumer = kit.consumer()
    consumer.assign([TopicPartition(topic, 0, OFFSET_END)])
    assert consumer.poll(0.5) is None
    kit.send(topic, [b"new"])
    message = consumer.poll(10)
    assert message is not None and (message.value(), message.offset()) == (b"new", 100)


def test_an_offset_out_of_range_is_an_error_where_no_reset_is_wanted(kit: Kit) -> None:
    topic = kit.topic()
    kit.send(topic, [b"x"])
    consumer = kit.consumer(auto_offset_reset="error")
    consumer.assign([TopicPartition(topic, 0, 50)])
    message = wait_until(lambda: consumer.poll(1))
    assert message.error().code() == KafkaError._AUTO_OFFSET_RESET


def test_search_by_time_finds_the_record(kit: Kit) -> None:
    topic = kit.topic()
    base = NOW - 1_000_000
    producer = kit.producer(linger_ms=50, batch_num_messages=5)
    for number in range(40):
        producer.produce(topic, b"%d" % number, partition=0, timestamp=base + number * 1000)
    assert producer.flush(20) == 0
    consumer = kit.consumer()

    def at(timestamp: int) -> int:
        found = consumer.offsets_for_times([TopicPartition(topic, 0, timestamp)], timeout=10)
        return int(found[0].offset)

    assert [at(0), at(base + 20_000), at(base + 20_001)] == [0, 20, 21]
    assert at(base + 10_000_000) == OFFSET_END


def test_a_waiting_reader_gets_a_record_at_once(kit: Kit) -> None:
    topic = kit.topic()
    consumer = kit.consumer(fetch_wait_max_ms=5000)
    consumer.assign([TopicPartition(topic, 0, 0)])
    consumer.poll(1)
    producer = kit.producer()
    producer.list_topics(topic, timeout=10)
    delays = []
    for _ in range(10):
        start = time.monotonic()
        producer.produce(topic, b"x", partition=0)
        producer.poll(0)
        message = consumer.poll(10)
        assert message is not None and message.error() is None
        delays.append(time.monotonic() - start)
    assert sorted(delays)[5] < 0.25


def test_min_bytes_are_waited_for_no_longer_than_the_wait(kit: Kit) -> None:
    topic = kit.topic()
    kit.send(topic, [b"x"])
    consumer = kit.consumer(fetch_min_bytes=50_000, fetch_wait_max_ms=700)
    start = time.monotonic()
    consumer.assign([TopicPartition(topic, 0, 0)])
    message = wait_until(lambda: consumer.poll(1))
    assert message.value() == b"x"
    assert time.monotonic() - start > 0.4


def test_a_topic_is_created_by_its_first_producer(kit: Kit) -> None:
    topic = unique("auto")
    assert kit.send(topic, [b"x"] * 3) == []
    assert len(kit.admin.list_topics(topic, timeout=10).topics[topic].partitions) == 4


def test_many_partitions_and_readers(kit: Kit) -> None:
    topic = kit.topic(partitions=60)
    producer = kit.producer()
    for number in range(600):
        producer.produce(topic, b"%d" % number, partition=number % 60)
    assert producer.flush(20) == 0
    results: list[int] = []

    def reader() -> None:
        own = Kit(kit.bootstrap, kit.kind)
        results.append(len(own.read(topic, 60)))
        own.close()

    threads = [threading.Thread(target=reader) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert results == [600] * 3


def test_a_reader_that_stops_reading_does_not_stop_others(kit: Kit) -> None:
    topic = kit.topic(max_message_bytes=10_000_000)
    kit.send(topic, [os.urandom(1 << 20)] * 30, producer=kit.producer(message_max_bytes=5_000_000))
    slow: Consumer = kit.consumer(queued_max_messages_kbytes=1024)
    slow.assign([TopicPartition(topic, 0, 0)])
    assert slow.poll(10) is not None
    assert len(kit.read(topic)) == 30
