"""What a clean stop leaves: the next start knows what reading the logs would tell it, or reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.connectors.broker import kept_index
from headrace.connectors.broker.compaction import Compaction
from headrace.connectors.broker.log import PartitionLog
from headrace.connectors.broker.segment import Segment
from headrace.connectors.broker.settings import TopicSettings
from headrace.connectors.broker.storage import MemoryStorage

Build = Callable[..., bytearray]
Make = Callable[..., TopicSettings]
PLACES = ("t/0", "t/1", "empty/0")


@pytest.fixture
def small(settings: Make) -> TopicSettings:
    """Segments of a few batches, compacted."""
    return settings(segment_bytes=400, cleanup_policy="compact", min_cleanable_dirty_ratio=0.0)


@pytest.fixture
def logs(memory: MemoryStorage, small: TopicSettings, batch: Build) -> list[PartitionLog]:
    """Plain, repeated, committed, aborted and open batches in several segments, some of them compacted."""
    made = [PartitionLog(memory, place, small) for place in PLACES]
    for log in made[:2]:
        for number in range(8):
            log.append(batch([(b"k%d" % (number % 3), b"v" * 40)]), 10 + number)
        for producer, commit in ((7, True), (8, False), (9, None)):
            for sequence in range(2):
                rows = [(b"k%d" % sequence, b"w")]
                log.append(batch(rows, producer=producer, epoch=1, sequence=sequence, transactional=True), 30)
            if commit is not None:
                log.append_marker(producer, 1, commit, 31)
    for _ in Compaction(made[0], [], 40).steps():
        pass
    assert any(segment.covered_to is not None for segment in made[0].segments) and len(made[1].segments) > 2
    assert made[1].open_transactions and made[1].aborted
    return made


def opened(memory: MemoryStorage, small: TopicSettings, data: Path) -> list[PartitionLog]:
    """The logs after a start in a folder with the mark."""
    kept = kept_index.take(data)
    return [PartitionLog(memory, place, small, 0, kept is None, (kept or {}).get(place)) for place in PLACES]


def facts(log: PartitionLog) -> object:
    """All that a log knows."""
    details = [(s.name, s.size, s.first_timestamp, s.newest, s.next_offset) for s in log.segments]
    return log.start, log.end, log.last_stable_offset, log.kept(), details


def test_a_start_after_a_clean_stop_reads_no_log_and_knows_as_much(
    memory: MemoryStorage, small: TopicSettings, batch: Build, logs: list[PartitionLog], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kept_index.leave(tmp_path, logs)
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "load", lambda *_: pytest.fail("a log is read"))
        quick = opened(memory, small, tmp_path)
    read = [PartitionLog(memory, place, small) for place in PLACES]
    assert [facts(log) for log in quick] == [facts(log) for log in read] == [facts(log) for log in logs]
    for log in (quick[1], logs[1]):  # a repeat of the open producer's batch is known, the next one is stored
        assert log.append(batch([(b"k1", b"w")], producer=9, epoch=1, sequence=1, transactional=True), 50) < log.end
    assert quick[1].end == logs[1].end


def test_the_mark_is_gone_once_it_was_taken(logs: list[PartitionLog], tmp_path: Path) -> None:
    assert kept_index.take(tmp_path) is None
    kept_index.leave(tmp_path, logs)
    assert set(kept_index.take(tmp_path) or ()) == set(PLACES)
    assert kept_index.take(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_a_partition_whose_files_are_others_is_read(
    memory: MemoryStorage, small: TopicSettings, batch: Build, logs: list[PartitionLog], tmp_path: Path
) -> None:
    kept_index.leave(tmp_path, logs)
    logs[1].append(batch([(b"late", b"v")]), 60)
    again = opened(memory, small, tmp_path)
    assert again[1].end == logs[1].end
    assert facts(again[1]) == facts(PartitionLog(memory, "t/1", small))


@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[:-9], lambda whole: b"[1]\n" + whole])
def test_a_damaged_mark_says_only_that_the_stop_was_clean(
    damage: Callable[[bytes], bytes], logs: list[PartitionLog], tmp_path: Path
) -> None:
    kept_index.leave(tmp_path, logs)
    mark = tmp_path / "clean-stop"
    mark.write_bytes(damage(mark.read_bytes()))
    assert kept_index.take(tmp_path) == {}


def test_a_full_disk_leaves_the_mark_alone(
    logs: list[PartitionLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        kept_index.leave(tmp_path, logs)
    assert [path.name for path in tmp_path.iterdir()] == ["clean-stop"]
    assert kept_index.take(tmp_path) == {}
