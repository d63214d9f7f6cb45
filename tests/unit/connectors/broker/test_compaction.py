"""Compaction keeps the newest of each key, survives a kill anywhere, and leaves readers' offsets alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headrace.connectors.broker import batches
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.compaction import Compaction, urgency
from headrace.connectors.broker.log import PartitionLog
from headrace.connectors.broker.settings import TopicSettings
from headrace.connectors.broker.storage import MemoryStorage
from headrace.connectors.broker.topics import Cleanings

Build = Callable[..., bytearray]
Make = Callable[..., TopicSettings]
Row = tuple[int, bytes | None, bool]


def _rows(log: PartitionLog) -> list[Row]:
    """(offset, key, has value) of every record a read_committed reader sees."""
    found = []
    for segment in log.segments:
        for index in range(len(segment)):
            data = segment.batch(index)
            header = batches.read_header(data)
            assert batches.checksum_matches(data, header)
            spans = [(a.first, a.last) for a in log.aborted if a.producer_id == header.producer_id]
            dropped = header.is_transactional and any(f <= header.base_offset <= last for f, last in spans)
            if header.is_control or dropped or header.base_offset >= log.last_stable_offset:
                continue
            content = batches.inflated(data, header)
            assert content is not None
            found += [(r.offset, r.key, r.has_value) for r in batches.records(content, header)]
    return found


def _latest(rows: list[Row]) -> dict[bytes | None, int]:
    return {key: offset for offset, key, has_value in rows if has_value} | {
        key: -1 for offset, key, has_value in rows if not has_value and offset == max(o for o, k, _ in rows if k == key)
    }


def _compact(log: PartitionLog, cleanings: Cleanings, now_ms: int) -> Cleanings:
    compaction = Compaction(log, cleanings, now_ms)
    passed = compaction.passed()
    for _ in compaction.steps():
        pass
    return passed


def test_superseded_records_go_and_offsets_stay(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    log = PartitionLog(memory, "t/0", settings(cleanup_policy="compact", segment_bytes=300))
    for turn in range(10):
        log.append(batch([(b"a", b"%d" % turn), (b"b", b"x"), (b"c%d" % turn, b"y")]), 0)
    before = _rows(log)
    assert urgency(log, 0) > 0.5
    _compact(log, [], 0)
    after = _rows(log)
    assert set(after) < set(before)
    assert _latest(after) == _latest(before)
    sealed_end = log.segments[-1].base
    kept_a = [offset for offset, key, _ in after if key == b"a" and offset < sealed_end]
    assert len(kept_a) <= 1
    assert urgency(log, 0) == 0.0
    again = PartitionLog(memory, "t/0", log.settings)
    assert (_rows(again), again.end) == (after, log.end)


def test_the_active_segment_and_open_transactions_are_left_alone(
    memory: MemoryStorage, settings: Make, batch: Build
) -> None:
    log = PartitionLog(memory, "t/0", settings(cleanup_policy="compact", segment_bytes=200))
    log.append(batch([(b"a", b"1")] * 3), 0)
    log.append(batch([(b"a", b"2")] * 3, 5, 0, 0, True), 0)
    for _ in range(6):
        log.append(batch([(b"a", b"3")] * 3), 0)
    _compact(log, [], 0)
    assert log.open_transactions == {5: 3}
    log.append_marker(5, 0, True, 0)
    assert [offset for offset, _, _ in _rows(log)][-3:] == [21, 22, 23]
    assert 3 in {offset for offset, _, _ in _rows(log)}


@pytest.mark.parametrize("codec", [0, 1, 4])
def test_aborted_data_goes_and_never_hides_a_committed_value(
    memory: MemoryStorage, settings: Make, batch: Build, codec: int
) -> None:
    log = PartitionLog(memory, "t/0", settings(cleanup_policy="compact", segment_bytes=250))
    log.append(batch([(b"a", b"good")], 1, 0, 0, True, codec=codec), 0)
    log.append_marker(1, 0, True, 0)
    log.append(batch([(b"a", b"bad")], 1, 0, 1, True, codec=codec), 0)
    log.append_marker(1, 0, False, 0)
    log.append(batch([(b"b", b"good")], 1, 0, 2, True, codec=codec), 0)
    log.append_marker(1, 0, True, 0)
    for _ in range(3):
        log.append(batch([(b"tick", b"x")] * 5, codec=codec), 0)
    _compact(log, [], 0)
    for current in (log, PartitionLog(memory, "t/0", log.settings)):
        rows = _rows(current)
        assert [key for _, key, _ in rows[:2]] == [b"a", b"b"]
        assert current.last_stable_offset == current.end
        assert current.aborted_between(0, current.end) == []


def test_tombstones_and_abort_markers_go_after_their_retention(
    memory: MemoryStorage, settings: Make, batch: Build
) -> None:
    log = PartitionLog(memory, "t/0", settings(cleanup_policy="compact", segment_bytes=200, delete_retention_ms=1000))
    log.append(batch([(b"a", b"1")]), 0)
    log.append(batch([(b"a", None)]), 0)
    log.append(batch([(b"z", b"1")], 1, 0, 0, True), 0)
    log.append_marker(1, 0, False, 0)
    log.append(batch([(b"tick", b"x" * 100)]), 0)
    log.append(batch([(b"tick", b"x" * 100)]), 0)
    cleanings = _compact(log, [], 5000)
    assert (b"a", False) in {(key, has) for _, key, has in _rows(log)}
    cleanings = _compact(log, cleanings, 5900)
    assert (b"a", False) in {(key, has) for _, key, has in _rows(log)}
    cleanings = _compact(log, cleanings, 6100)
    assert {key for _, key, _ in _rows(log)} == {b"tick"}
    controls = [s for s in log.segments[:-1] for i in range(len(s)) if batches.read_header(s.batch(i)).is_control]
    assert controls == []


def test_small_neighbours_are_merged(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    log = PartitionLog(memory, "t/0", settings(cleanup_policy="compact", segment_bytes=5000, segment_ms=1))
    for turn in range(40):
        log.append(batch([(b"%d" % (turn % 4), b"x")]), turn * 10)
    assert len(log.segments) == 40
    _compact(log, [], 1000)
    assert len(log.segments) == 2 and len(memory.files) == 2


def test_a_kill_at_every_write_leaves_the_latest_values(
    killable: MemoryStorage, killed: type[BaseException], settings: Make, batch: Build
) -> None:
    done = False
    for kill_at in range(1, 200):
        storage = type(killable)()
        log = PartitionLog(storage, "t/0", settings(cleanup_policy="compact", segment_bytes=400))
        shuffle = random.Random(kill_at)
        for turn in range(60):
            key = b"%d" % shuffle.randrange(8)
            log.append(batch([(key, b"x" * 20), (key, b"%d" % turn if shuffle.random() > 0.2 else None)]), 0)
        before = _latest(_rows(log))
        storage.kill_at = storage.writes + kill_at  # type: ignore[attr-defined]
        try:
            _compact(log, [], 0)
            done = True
        except killed:
            pass
        storage.kill_at = None  # type: ignore[attr-defined]
        again = PartitionLog(storage, "t/0", log.settings)
        assert (_latest(_rows(again)), again.end) == (before, 120), f"killed at write {kill_at}"
        if done:
            break
    assert done


def test_a_deleted_topic_stops_the_pass(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    log = PartitionLog(memory, "t/0", settings(cleanup_policy="compact", segment_bytes=200))
    for _ in range(10):
        log.append(batch([(b"a", b"1")] * 3), 0)
    steps = Compaction(log, [], 0).steps()
    next(steps)
    log.deleted = True
    names = set(memory.files)
    for _ in steps:
        pass
    assert {n for n in set(memory.files) - names if not n.endswith(".tmp")} == set()


@pytest.mark.parametrize(
    ("given", "due"),
    [
        ({"min_cleanable_dirty_ratio": 0.9}, True),
        ({"min_compaction_lag_ms": 10_000}, False),
        ({"cleanup_policy": "delete"}, False),
    ],
)
def test_when_a_pass_is_due(
    memory: MemoryStorage, settings: Make, batch: Build, given: dict[str, object], due: bool
) -> None:
    log = PartitionLog(memory, "t/0", settings(**{"cleanup_policy": "compact", "segment_bytes": 200, **given}))
    for _ in range(4):
        log.append(batch([(b"a", b"1")] * 3), 0)
    assert (urgency(log, 2000) > 0) is due


def test_the_lag_makes_a_pass_due_whatever_the_share(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    given = {"cleanup_policy": "compact", "segment_bytes": 200, "min_cleanable_dirty_ratio": 1}
    log = PartitionLog(memory, "t/0", settings(**given, max_compaction_lag_ms=1000))
    for turn in range(9):
        log.append(batch([(b"%d" % turn, b"1")] * 3), 0)
    _compact(log, [], 0)
    for _ in range(2):
        log.append(batch([(b"a", b"1")] * 3), 0)
    assert urgency(log, 1500) == 0.0
    assert urgency(log, 2500) == 1.0


@pytest.mark.parametrize("codec", [0, 1, 4])
def test_a_producer_goes_on_after_its_records_were_superseded_and_the_broker_started_again(
    memory: MemoryStorage, settings: Make, batch: Build, codec: int
) -> None:
    """A batch without records keeps the sequence number; a repeat of it is still recognised, a gap still refused."""
    log = PartitionLog(memory, "t/0", settings(cleanup_policy="compact", segment_bytes=200))
    for sequence in range(3):
        log.append(batch([(b"a", b"%d" % sequence)], 7, 0, sequence, codec=codec), 0)
    for _ in range(6):
        log.append(batch([(b"a", b"x" * 40)]), 0)
    _compact(log, [], 1000)
    assert {offset for offset, _, _ in _rows(log)}.isdisjoint(range(3))
    for current in (log, PartitionLog(memory, "t/0", log.settings)):
        assert current.append(batch([(b"a", b"2")], 7, 0, 2, codec=codec), 0) == 2
        with pytest.raises(BrokerError) as caught:
            current.append(batch([(b"a", b"4")], 7, 0, 4), 0)
        assert caught.value.code is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    again = PartitionLog(memory, "t/0", log.settings)
    assert again.append(batch([(b"a", b"3")], 7, 0, 3), 0) == again.end - 1
    headers = [batches.read_header(s.batch(i)) for s in again.segments for i in range(len(s))]
    assert [h.base_sequence for h in headers if h.record_count == 0] == [2], "one batch of the producer, not all"
    _compact(again, [], 1000)
    assert all(
        h.record_count for s in again.segments[:-1] for i in range(len(s)) if (h := batches.read_header(s.batch(i)))
    )


def test_an_aborted_producer_keeps_its_sequence_and_a_silent_one_is_forgotten_after_a_day(
    memory: MemoryStorage, settings: Make, batch: Build
) -> None:
    log = PartitionLog(memory, "t/0", settings(cleanup_policy="compact", segment_bytes=200))
    log.append(batch([(b"a", b"1")] * 2, 7, 0, 0, True), 0)
    log.append_marker(7, 0, False, 0)
    for _ in range(4):
        log.append(batch([(b"tick", b"x" * 60)]), 0)
    _compact(log, [], 1000)
    again = PartitionLog(memory, "t/0", log.settings)
    assert again.last_stable_offset == again.end
    assert {key for _, key, _ in _rows(again)} == {b"tick"}
    assert again.append(batch([(b"a", b"1")] * 2, 7, 0, 0, True), 0) == 0, "a repeat"
    _compact(again, [], 90_000_000)
    sealed = [batches.read_header(s.batch(i)) for s in again.segments[:-1] for i in range(len(s))]
    assert all(header.record_count for header in sealed)
