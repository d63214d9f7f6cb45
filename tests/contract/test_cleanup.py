"""Compaction and retention, with settings that let them be seen within seconds."""

from __future__ import annotations

import os
import time

import pytest
from kafka_kit import Kit, wait_until

EAGER = {
    "cleanup_policy": "compact",
    "segment_ms": 100,
    "min_cleanable_dirty_ratio": 0.01,
    "max_compaction_lag_ms": 500,
    "delete_retention_ms": 100,
}


def _latest(kit: Kit, topic: str) -> tuple[dict[bytes, bytes | None], int]:
    """(last value of each key, number of records), as read_committed sees it."""
    found = kit.read(topic)
    return {message.key(): message.value() for message in found}, len(found)


def _tick(kit: Kit, topic: str) -> None:
    """A record that lets the active segment roll."""
    kit.send(topic, [b"tick"], [b"tick"])


def test_compaction_keeps_the_newest_of_each_key(kit: Kit) -> None:
    topic = kit.topic(**EAGER)
    for turn in range(5):
        kit.send(topic, [b"%d-%d" % (turn, key) for key in range(20)], [b"k%d" % key for key in range(20)])
        time.sleep(0.15)
    end = kit.watermarks(topic)[1]
    expected = {b"k%d" % key: b"4-%d" % key for key in range(20)}

    def compacted() -> bool:
        _tick(kit, topic)
        latest, count = _latest(kit, topic)
        assert {key: value for key, value in latest.items() if key != b"tick"} == expected
        return count <= 24

    wait_until(compacted, 30)
    assert kit.watermarks(topic)[1] > end
    assert kit.read(topic, start=3)[0].offset() >= 80


def test_tombstones_go_in_the_end(kit: Kit) -> None:
    topic = kit.topic(**EAGER)
    kit.send(topic, [b"v", b"stays"], [b"gone", b"kept"])
    time.sleep(0.2)
    kit.send(topic, [None], [b"gone"])

    def gone() -> bool:
        _tick(kit, topic)
        time.sleep(0.2)
        latest, _ = _latest(kit, topic)
        assert latest[b"kept"] == b"stays"
        return b"gone" not in latest

    wait_until(gone, 30)


def test_aborted_records_never_hide_a_committed_value(kit: Kit) -> None:
    topic = kit.topic(**EAGER)
    producer = kit.transactional()
    for value, commit in ((b"good", True), (b"bad", False)):
        producer.begin_transaction()
        kit.send(topic, [value] * 20, [b"k"] * 20, producer=producer)
        if commit:
            producer.commit_transaction(15)
        else:
            producer.abort_transaction(15)
        time.sleep(0.15)

    def compacted() -> bool:
        _tick(kit, topic)
        latest, count = _latest(kit, topic)
        assert latest[b"k"] == b"good"
        return count <= 5

    wait_until(compacted, 30)
    assert b"bad" not in kit.values(topic, isolation_level="read_uncommitted")


@pytest.mark.parametrize("codec", ["none", "gzip", "zstd"])
def test_compressed_batches_are_compacted(kit: Kit, codec: str) -> None:
    topic = kit.topic(**EAGER)
    producer = kit.producer(compression_type=codec, linger_ms=50)
    kit.send(topic, [b"%d" % i for i in range(200)], [b"k%d" % (i % 3) for i in range(200)], producer=producer)
    time.sleep(0.15)

    def compacted() -> bool:
        _tick(kit, topic)
        latest, count = _latest(kit, topic)
        assert [latest[b"k%d" % key] for key in range(3)] == [b"198", b"199", b"197"]
        return count <= 8

    wait_until(compacted, 30)


def test_a_compacted_topic_wants_keys(kit: Kit) -> None:
    topic = kit.topic(cleanup_policy="compact")
    assert kit.send(topic, [b"v"]) == ["INVALID_RECORD"]
    assert kit.send(topic, [b"v"], [b"k"]) == []


def test_old_segments_go_by_age(kit: Kit) -> None:
    topic = kit.topic(retention_ms=4000, segment_ms=200)
    kit.send(topic, [b"%d" % i for i in range(50)])
    time.sleep(0.3)
    kit.send(topic, [b"later"])
    wait_until(lambda: kit.watermarks(topic)[0] >= 50, 30)
    kit.send(topic, [b"new"])
    assert kit.values(topic)[-1] == b"new"
    assert kit.watermarks(topic)[1] == 52


def test_old_segments_go_by_size(kit: Kit) -> None:
    topic = kit.topic(retention_bytes=2_000_000, segment_bytes=1_048_576)
    kit.send(topic, [os.urandom(10_000) for _ in range(800)])
    # a look while records still arrived may have left more than the last one will
    wait_until(lambda: kit.watermarks(topic)[0] > 800 - 420, 30)
    low, high = kit.watermarks(topic)
    assert high == 800 and 200 <= high - low < 420
    assert len(kit.values(topic)) == high - low
