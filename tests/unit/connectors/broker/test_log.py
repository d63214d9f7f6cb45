"""One partition: offsets, segments, recovery, transactions, deletion."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.connectors.broker import batches
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.log import PartitionLog
from headrace.connectors.broker.settings import TopicSettings
from headrace.connectors.broker.storage import DiskStorage, MemoryFile, MemoryStorage

Build = Callable[..., bytearray]
Make = Callable[..., TopicSettings]


def _pairs(count: int, size: int = 10) -> list[tuple[bytes | None, bytes | None]]:
    return [(b"k%d" % i, b"v" * size) for i in range(count)]


def _offsets(log: PartitionLog, start: int | None = None, limit: int | None = None) -> list[int]:
    """Offsets of all records that a reader gets from `start` on, markers included."""
    offset = log.start if start is None else start
    found: list[int] = []
    while (piece := log.read(offset, 1 << 20, log.end if limit is None else limit, True)) is not None:
        data = piece[0].file.read(piece[0].position, piece[0].size)
        position = 0
        while position < len(data):
            header = batches.read_header(data, position)
            found += range(header.base_offset, header.last_offset + 1)
            position += header.size
        offset = piece[1]
    return [o for o in found if start is None or o >= start]


def test_offsets_are_dense_and_reads_start_at_the_batch_that_holds_the_offset(
    memory: MemoryStorage, settings: Make, batch: Build
) -> None:
    log = PartitionLog(memory, "t/0", settings())
    assert [log.append(batch(_pairs(3)), 0) for _ in range(4)] == [0, 3, 6, 9]
    assert _offsets(log) == list(range(12))
    piece = log.read(4, 1, log.end, True)
    assert piece is not None and batches.read_header(piece[0].file.read(piece[0].position, 61)).base_offset == 3
    assert piece[1] == 6
    assert log.read(4, 1, log.end, False) is None
    assert log.read(12, 100, log.end, True) is None


def test_a_log_comes_back_from_its_files(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    small = settings(segment_bytes=400)
    log = PartitionLog(memory, "t/0", small)
    for _ in range(10):
        log.append(batch(_pairs(3)), 0)
    assert len(log.segments) > 3
    again = PartitionLog(memory, "t/0", small)
    assert (again.start, again.end, _offsets(again)) == (0, 30, list(range(30)))
    assert again.append(batch(_pairs(1)), 0) == 30


@pytest.mark.parametrize("torn", [1, 30, 61, 75])
def test_a_torn_tail_is_cut(memory: MemoryStorage, settings: Make, batch: Build, torn: int) -> None:
    log = PartitionLog(memory, "t/0", settings())
    log.append(batch(_pairs(2)), 0)
    whole = log.size
    tail = batch(_pairs(2))
    batches.place(tail, 2)
    log.segments[0].file.append(tail[:torn])
    again = PartitionLog(memory, "t/0", settings())
    assert (again.end, again.size) == (2, whole)


def test_a_last_batch_with_a_wrong_checksum_is_cut_after_an_unclean_stop_only(
    memory: MemoryStorage, settings: Make, batch: Build
) -> None:
    log = PartitionLog(memory, "t/0", settings())
    log.append(batch(_pairs(2)), 0)
    log.append(batch(_pairs(2)), 0)
    file = memory.files["t/0/00000000000000000000.log"]
    file.data[-1] ^= 255
    assert PartitionLog(memory, "t/0", settings(), verify_tail=False).end == 4
    assert PartitionLog(memory, "t/0", settings()).end == 2


def test_a_full_disk_refuses_the_batch_and_keeps_nothing_of_it(settings: Make, batch: Build) -> None:
    memory = MemoryStorage()
    memory.files["t/0/00000000000000000000.log"] = file = MemoryFile(limit=250)
    log = PartitionLog(memory, "t/0", settings())
    log.append(batch(_pairs(3)), 0)
    with pytest.raises(BrokerError) as caught:
        log.append(batch(_pairs(9)), 0)
    assert caught.value.code is Code.KAFKA_STORAGE_ERROR
    assert log.end == 3
    file.limit = None
    assert log.append(batch(_pairs(9)), 0) == 3
    assert PartitionLog(memory, "t/0", settings()).end == 12


def test_segments_roll_by_size_and_by_age(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    log = PartitionLog(memory, "t/0", settings(segment_ms=1000, segment_bytes=1000))
    for now in (0, 500, 1001, 1500, 2100):
        log.append(batch(_pairs(1)), now)
    assert [segment.base for segment in log.segments] == [0, 2, 4]


def test_repeats_are_stored_once_and_gaps_refused_also_after_a_restart(
    memory: MemoryStorage, settings: Make, batch: Build
) -> None:
    log = PartitionLog(memory, "t/0", settings())
    for sequence in (0, 2, 4):
        log.append(batch(_pairs(2), producer=7, epoch=0, sequence=sequence), 0)
    for current in (log, PartitionLog(memory, "t/0", settings())):
        assert current.append(batch(_pairs(2), producer=7, epoch=0, sequence=2), 0) == 2
        with pytest.raises(BrokerError) as caught:
            current.append(batch(_pairs(2), producer=7, epoch=0, sequence=8), 0)
        assert caught.value.code is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert current.end == 6
    assert log.append(batch(_pairs(1), producer=7, epoch=1, sequence=0), 0) == 6
    with pytest.raises(BrokerError) as caught:
        log.append(batch(_pairs(1), producer=7, epoch=0, sequence=6), 0)
    assert caught.value.code is Code.INVALID_PRODUCER_EPOCH


def test_sequence_numbers_wrap(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    log = PartitionLog(memory, "t/0", settings())
    log.append(batch(_pairs(2), producer=7, epoch=0, sequence=2**31 - 2), 0)
    assert log.append(batch(_pairs(1), producer=7, epoch=0, sequence=0), 0) == 2


def test_the_last_stable_offset_waits_for_the_oldest_open_transaction(
    memory: MemoryStorage, settings: Make, batch: Build
) -> None:
    log = PartitionLog(memory, "t/0", settings())
    log.append(batch(_pairs(1)), 0)
    log.append(batch(_pairs(2), 1, 0, 0, True), 0)
    log.append(batch(_pairs(2), 2, 0, 0, True), 0)
    assert log.last_stable_offset == 1
    assert _offsets(log, limit=log.last_stable_offset) == [0]
    log.append_marker(1, 0, False, 0)
    assert log.last_stable_offset == 3
    log.append_marker(2, 0, True, 0)
    for current in (log, PartitionLog(memory, "t/0", settings())):
        assert current.last_stable_offset == current.end == 7
        assert current.aborted_between(0, 3) == [(1, 1)]
        assert current.aborted_between(6, 7) == []


def test_a_marker_carries_a_checksum_and_is_written_once(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    log = PartitionLog(memory, "t/0", settings())
    log.append(batch(_pairs(1), 1, 3, 0, True), 0)
    log.append_marker(1, 3, True, 5)
    log.append_marker(1, 3, True, 5)
    assert log.end == 2
    data = log.segments[0].batch(1)
    header = batches.read_header(data)
    assert header.is_control and header.is_transactional and batches.marker_commits(data)
    assert batches.checksum_matches(data, header)


def test_the_start_moves_and_whole_segments_leave_the_disk(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    small = settings(segment_bytes=400)
    log = PartitionLog(memory, "t/0", small)
    for _ in range(10):
        log.append(batch(_pairs(3)), 0)
    log.advance_start(14)
    assert log.start == 14
    assert log.segments[0].base <= 14 < log.segments[1].base
    log.advance_start(30)
    assert log.size == 0 and len(memory.files) == 1
    again = PartitionLog(memory, "t/0", small, start=30)
    assert (again.start, again.end) == (30, 30)
    assert again.append(batch(_pairs(1)), 0) == 30


def test_retention_by_age_and_by_size(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    aged = PartitionLog(memory, "a/0", settings(retention_ms=1000, segment_bytes=300))
    for age in (0, 500, 1800):
        aged.append(batch(_pairs(4), timestamps=[age] * 4), 0)
    assert aged.enforce_retention(2000)
    assert (aged.start, _offsets(aged)) == (8, [8, 9, 10, 11])
    assert aged.enforce_retention(9000)
    assert (aged.start, aged.end, aged.size) == (12, 12, 0)
    sized = PartitionLog(memory, "b/0", settings(retention_bytes=500, segment_bytes=200))
    for _ in range(10):
        sized.append(batch(_pairs(4)), 0)
    assert sized.enforce_retention(0)
    assert 500 <= sized.size < 900 and sized.start > 0


def test_search_by_time_is_exact_inside_batches(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    log = PartitionLog(memory, "t/0", settings(segment_bytes=300))
    for first in range(0, 50, 5):
        log.append(batch(_pairs(5), timestamps=[1000 * (first + i) for i in range(5)], codec=4 * (first % 2)), 0)
    assert log.offset_for_timestamp(0) == (0, 0)
    assert log.offset_for_timestamp(27_000) == (27_000, 27)
    assert log.offset_for_timestamp(27_001) == (28_000, 28)
    assert log.offset_for_timestamp(49_001) == (-1, -1)
    assert log.newest_record() == (49_000, 49)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda b: b[:40], Code.CORRUPT_MESSAGE),
        (lambda b: b[:16] + b"\1" + b[17:], Code.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        (lambda b: b + b, Code.INVALID_RECORD),
        (lambda b: b[:23] + b"\0\0\0\7" + b[27:], Code.INVALID_RECORD),
        (lambda b: b[:22] + b"\x30" + b[23:], Code.INVALID_RECORD),
    ],
)
def test_what_is_no_batch_of_a_client_is_refused(
    memory: MemoryStorage, settings: Make, batch: Build, spoil: Callable[[bytearray], bytearray], code: Code
) -> None:
    log = PartitionLog(memory, "t/0", settings())
    with pytest.raises(BrokerError) as caught:
        log.append(spoil(batch(_pairs(2))), 0)
    assert caught.value.code is code
    assert log.end == 0


def test_size_and_keys_are_checked(memory: MemoryStorage, settings: Make, batch: Build) -> None:
    log = PartitionLog(memory, "t/0", settings(max_message_bytes=200))
    with pytest.raises(BrokerError) as caught:
        log.append(batch(_pairs(1, 300)), 0)
    assert caught.value.code is Code.MESSAGE_TOO_LARGE
    compacted = PartitionLog(memory, "c/0", settings(cleanup_policy="compact"))
    for codec in (0, 1, 4):
        compacted.append(batch([(b"k", b"v")], codec=codec), 0)
        with pytest.raises(BrokerError) as caught:
            compacted.append(batch([(b"k", b"v"), (None, b"v")], codec=codec), 0)
        assert caught.value.code is Code.INVALID_RECORD


def test_on_disk_too(tmp_path: Path, settings: Make, batch: Build) -> None:
    storage = DiskStorage(tmp_path)
    log = PartitionLog(storage, "topics/t/0", settings(segment_bytes=400))
    for _ in range(10):
        log.append(batch(_pairs(3)), 0)
    held = log.read(0, 10_000, log.end, True)
    log.advance_start(30)
    assert held is not None and len(held[0].file.read(held[0].position, held[0].size)) == held[0].size
    assert len(list((tmp_path / "topics/t/0").iterdir())) == 1
    again = PartitionLog(storage, "topics/t/0", settings(), start=30)
    assert again.end == 30
