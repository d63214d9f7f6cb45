"""Housekeeping of a broker in virtual time: retention, compaction and journals, also when the disk says no."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.connectors.broker.broker import RETENTION_INTERVAL, Broker, BrokerOptions, Times
from headrace.connectors.broker.groups import JoinRequest, JoinResult
from headrace.connectors.broker.log import PartitionLog
from headrace.connectors.broker.offsets import Committed
from headrace.connectors.broker.storage import MemoryStorage, StorageError

Build = Callable[..., bytearray]
SMALL = {"segment.bytes": "300"}


def _broker(memory: MemoryStorage, said: list[str] | None = None, now: float = 0.0) -> Broker:
    log_error = [].append if said is None else said.append
    return Broker(memory, BrokerOptions(first_join_delay=0.0), Times(now, int(now * 1000)), log_error=log_error)


def _log(broker: Broker, topic: str, partition: int = 0) -> PartitionLog:
    log = broker.topics.log(topic, partition)
    assert log is not None
    return log


def _fill(broker: Broker, topic: str, batch: Build, count: int = 12) -> None:
    for turn in range(count):
        _log(broker, topic).append(batch([(b"k", b"%d" % turn)] * 3, timestamps=[turn] * 3), turn)


def test_retention_is_looked_at_once_in_its_interval(memory: MemoryStorage, batch: Build) -> None:
    broker = _broker(memory)
    broker.topics.create("aged", 1, {"retention.ms": "1000", **SMALL})
    _fill(broker, "aged", batch)
    broker.tick(Times(0.0, 100))
    broker.tick(Times(RETENTION_INTERVAL - 0.1, 10_000))
    assert _log(broker, "aged").start == 0
    broker.tick(Times(RETENTION_INTERVAL, 10_000))
    assert _log(broker, "aged").start == 36


@pytest.mark.parametrize(("given", "kept"), [({"retention.ms": "-1"}, 36), ({"retention.bytes": "0"}, 3)])
def test_unlimited_and_no_bytes(memory: MemoryStorage, batch: Build, given: dict[str, str], kept: int) -> None:
    broker = _broker(memory)
    broker.topics.create("t", 1, {**SMALL, **given})
    _fill(broker, "t", batch)
    broker.tick(Times(10.0, 86_400_000))
    log = _log(broker, "t")
    assert log.end == 36
    assert log.end - log.start <= kept + 9
    assert log.end - log.start >= kept


def test_the_most_urgent_partition_is_compacted_first_a_step_at_a_time(memory: MemoryStorage, batch: Build) -> None:
    broker = _broker(memory)
    for name, count in (("few", 4), ("many", 40)):
        broker.topics.create(name, 1, {"cleanup.policy": "compact", **SMALL, "min.cleanable.dirty.ratio": "0.1"})
        _fill(broker, name, batch, count)
    assert not broker.housekeep(), "nothing to do before the first look"
    sizes = []
    for second in range(1, 8):
        broker.tick(Times(float(second), 100_000))
        steps = 0
        while broker.housekeep():
            steps += 1
        sizes.append(steps)
    assert [len(_log(broker, name).segments) for name in ("few", "many")] == [2, 2]
    assert max(sizes) >= 40, "a step is a batch"
    assert sizes[-1] == 0, "nothing is due any more"


def test_a_disk_without_room_for_a_compacted_segment_loses_nothing_and_is_named(
    memory: MemoryStorage, batch: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    broker = _broker(memory, said)
    broker.topics.create("t", 1, {"cleanup.policy": "compact", **SMALL})
    _fill(broker, "t", batch)
    before = {name: bytes(file.data) for name, file in memory.files.items()}
    opened = memory.open

    def narrow(name: str):  # type: ignore[no-untyped-def]
        file = opened(name)
        if name.endswith("compaction.tmp"):
            memory.files[name].limit = 10
        return file

    monkeypatch.setattr(memory, "open", narrow)
    broker.tick(Times(1.0, 100_000))
    while broker.housekeep():
        pass
    assert said == ["compaction waits for disk space: the limit of 10 bytes is reached"]
    assert {name: bytes(file.data) for name, file in memory.files.items() if name in before} == before
    monkeypatch.setattr(memory, "open", opened)
    broker.tick(Times(2.5, 100_000))
    while broker.housekeep():
        pass
    assert len(_log(broker, "t").segments) == 2
    assert not any(name.endswith(".tmp") for name in memory.files)


def test_journals_that_cannot_be_rewritten_stay_in_use_and_are_tried_again(
    memory: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    broker = _broker(memory, said)
    broker.topics.create("t", 1, {})
    for offset in range(12_000):
        broker.offsets.commit("g", {("t", 0): Committed(offset, -1, "")})
    opened = memory.open

    def refuse(name: str):  # type: ignore[no-untyped-def]
        if name.endswith(".new"):
            raise StorageError("no room")
        return opened(name)

    monkeypatch.setattr(memory, "open", refuse)
    broker.tick(Times(2.0, 0))
    assert said == ["housekeeping waits for disk space: no room"]
    broker.offsets.commit("g", {("t", 0): Committed(77, -1, "")})
    assert _broker(memory).offsets.of("g")["t", 0].offset == 77
    monkeypatch.setattr(memory, "open", opened)
    broker.tick(Times(4.0, 0))
    assert len(memory.files["offsets.jsonl"].data) < 200
    assert _broker(memory).offsets.of("g")["t", 0].offset == 77


def test_a_topic_that_is_deleted_while_it_is_compacted_ends_the_pass(memory: MemoryStorage, batch: Build) -> None:
    broker = _broker(memory)
    broker.topics.create("t", 1, {"cleanup.policy": "compact", **SMALL})
    _fill(broker, "t", batch)
    broker.tick(Times(1.0, 100_000))
    assert broker.housekeep()
    broker.topics.delete("t")
    broker.topics.create("t", 1, {})
    while broker.housekeep():
        pass
    assert (_log(broker, "t").end, _log(broker, "t").size) == (0, 0)
    assert _broker(memory).topics.names() == ["t"]


def test_a_broker_that_starts_again_goes_on_with_everything(memory: MemoryStorage, batch: Build) -> None:
    broker = _broker(memory)
    broker.topics.create("t", 2, {"retention.ms": "-1"})
    _fill(broker, "t", batch)
    broker.offsets.commit("g", {("t", 0): Committed(5, 1, "note")})
    producer, epoch = broker.transactions.init("id", 60_000, None, 0.0)
    broker.transactions.add_partitions("id", producer, epoch, [("t", 1)], 0.0)
    _log(broker, "t", 1).append(batch([(b"k", b"v")], producer, epoch, 0, True), 0)
    joined: list[JoinResult] = []
    request = JoinRequest("g", "", "ops-0", "c", "/h", 6_000, 10_000, "consumer", [("range", b"")], False)
    broker.groups.join(request, joined.append, 0.0)
    broker.tick(Times(0.1, 0))
    again = _broker(memory, now=50.0)
    assert (_log(again, "t").end, _log(again, "t", 1).last_stable_offset) == (36, 0)
    assert again.offsets.of("g") == {("t", 0): Committed(5, 1, "note")}
    group = again.groups.get("g")
    assert group is not None
    assert list(group.instances) == ["ops-0"]
    again.transactions.end("id", producer, epoch, True, 50.0)
    assert _log(again, "t", 1).last_stable_offset == 2
    again.tick(Times(51.0, 0))
    assert _log(again, "t", 1).aborted_between(0, 2) == []
