"""Committed offsets, and the list of topics, across restarts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.connectors.broker import settings as topic_settings
from headrace.connectors.broker.broker import Broker, BrokerOptions, Times
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.offsets import Committed, OffsetStore
from headrace.connectors.broker.storage import MemoryStorage, StorageError
from headrace.connectors.broker.topics import Topics

Build = Callable[..., bytearray]


def test_offsets_survive_with_epoch_and_metadata(memory: MemoryStorage) -> None:
    store = OffsetStore(memory)
    store.commit("g", {("t", 0): Committed(5, 2, "note ☃"), ("t", 1): Committed(6, -1, "")})
    store.commit("g", {("t", 0): Committed(7, -1, "")})
    store.commit("h", {("t", 0): Committed(1, -1, "")})
    store.forget("h", [("t", 0)])
    again = OffsetStore(memory)
    assert again.of("g") == {("t", 0): Committed(7, -1, ""), ("t", 1): Committed(6, -1, "")}
    assert again.groups() == ["g"]


def test_a_refused_write_leaves_the_old_offset(memory: MemoryStorage) -> None:
    store = OffsetStore(memory)
    store.commit("g", {("t", 0): Committed(5, -1, "")})
    file = memory.files["offsets.jsonl"]
    file.limit = len(file.data)
    with pytest.raises(StorageError):
        store.commit("g", {("t", 0): Committed(6, -1, "")})
    assert store.of("g")["t", 0].offset == OffsetStore(memory).of("g")["t", 0].offset == 5


def test_the_offset_journal_is_folded(memory: MemoryStorage) -> None:
    store = OffsetStore(memory)
    for offset in range(12_000):
        store.commit("g", {("t", offset % 3): Committed(offset, -1, "")})
    store.compact_journal()
    assert len(memory.files["offsets.jsonl"].data) < 200
    assert OffsetStore(memory).of("g") == store.of("g")


def test_a_pending_offset_is_pending_until_its_last_holder_lets_go(memory: MemoryStorage) -> None:
    store = OffsetStore(memory)
    store.hold("g", [("t", 0)], 1)
    store.hold("g", [("t", 0)], 2)
    store.release("g", [("t", 0)], 1)
    assert store.is_pending("g", ("t", 0)) and not store.is_pending("h", ("t", 0))
    store.release("g", [("t", 0)], 2)
    assert not store.is_pending("g", ("t", 0))


def test_topics_survive_with_settings_starts_and_data(memory: MemoryStorage, batch: Build) -> None:
    topics = Topics(memory)
    topics.create("a", 2, {"retention.ms": "5000"})
    topics.create("gone", 1, {})
    log = topics.log("a", 1)
    assert log is not None
    for _ in range(4):
        log.append(batch([(b"k", b"v")] * 5), 0)
    assert topics.delete_records("a", 1, 7) == 7
    topics.add_partitions("a", 3, dry_run=False)
    topics.alter("a", {"retention.ms": "6000"})
    topics.delete("gone")
    again = Topics(memory)
    assert again.names() == ["a"]
    topic = again.get("a")
    assert topic is not None and (len(topic.logs), topic.given) == (3, {"retention.ms": "6000"})
    assert [(log.start, log.end) for log in topic.logs] == [(0, 0), (7, 20), (0, 0)]


def test_a_topic_of_an_old_name_starts_empty(memory: MemoryStorage, batch: Build) -> None:
    topics = Topics(memory)
    for _ in range(2):
        topics.create("a", 1, {})
        log = topics.log("a", 0)
        assert log is not None and log.end == 0
        log.append(batch([(b"k", b"v")] * 3), 0)
        topics.delete_records("a", 0, 2)
        topics.delete("a")
    topics.create("a", 1, {})
    again = Topics(memory).log("a", 0)
    assert again is not None and (again.start, again.end) == (0, 0)


def test_files_of_a_topic_whose_removal_was_interrupted_are_removed_at_start(memory: MemoryStorage) -> None:
    Topics(memory).create("a", 1, {})
    memory.open("topics/orphan/0/00000000000000000000.log").append(b"x" * 100)
    Topics(memory)
    assert not any("orphan" in name for name in memory.files)


def test_a_kill_at_any_write_of_the_topic_list_leaves_a_topic_or_none(
    killable: MemoryStorage, killed: type[BaseException]
) -> None:
    for kill_at in range(1, 4):
        storage = type(killable)()
        storage.kill_at = kill_at  # type: ignore[attr-defined]
        topics = Topics(storage)
        created = []
        try:
            for name in ("a", "b", "c"):
                topics.create(name, 1, {})
                created.append(name)
        except killed:
            pass
        storage.kill_at = None  # type: ignore[attr-defined]
        assert Topics(storage).names() == created


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention.ms", "-2"),
        ("segment.bytes", "1"),
        ("min.cleanable.dirty.ratio", "1.5"),
        ("cleanup.policy", "compact,burn"),
        ("message.timestamp.type", "LogAppendTime"),
        ("max.message.bytes", "many"),
        ("no.such", "1"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: str) -> None:
    with pytest.raises(BrokerError) as caught:
        topic_settings.check(name, value)
    assert caught.value.code is Code.INVALID_CONFIG
    assert name in caught.value.reason


def test_every_default_is_itself_allowed() -> None:
    for name, value in topic_settings.DEFAULTS.items():
        topic_settings.check(name, value)


def test_compaction_and_retention_run_by_the_clock_that_is_passed_in(memory: MemoryStorage, batch: Build) -> None:
    """A year of virtual time in a moment: the broker has no clock of its own."""
    broker = Broker(memory, BrokerOptions(), Times(0.0, 0))
    broker.topics.create("aged", 1, {"retention.ms": "1000", "segment.bytes": "300"})
    broker.topics.create("kept", 1, {"cleanup.policy": "compact", "segment.bytes": "300"})
    for name in ("aged", "kept"):
        log = broker.topics.log(name, 0)
        assert log is not None
        for turn in range(12):
            log.append(batch([(b"k", b"%d" % turn)] * 3, timestamps=[turn] * 3), turn)
    broker.tick(Times(31_536_000.0, 31_536_000_000))
    while broker.housekeep():
        pass
    aged, kept = broker.topics.log("aged", 0), broker.topics.log("kept", 0)
    assert aged is not None and kept is not None
    assert (aged.start, aged.end, aged.size) == (36, 36, 0)
    assert len(kept.segments) == 2 and kept.start == 0
    topic = broker.topics.get("kept")
    assert topic is not None and topic.cleanings[0] == [(kept.segments[-1].base, 31_536_000_000)]
