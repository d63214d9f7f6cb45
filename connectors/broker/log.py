"""The log of one partition: batches in segments, offsets, transactions and producers of it.

A state machine over `Storage`, without a clock (times are passed in) and without sockets. It owns the partition's
guarantees: offsets are dense per append and never reused, a batch is stored whole or not at all, repeats of idempotent
producers are stored once, the last stable offset never passes an open transaction, and aborted data is listed for
readers. Everything but the start offset set by `delete_records` is rebuilt from the files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import NamedTuple, Protocol

from headrace.connectors.broker import batches
from headrace.connectors.broker.batches import Header
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.kept_index import KeptLog
from headrace.connectors.broker.producers import ProducerStates
from headrace.connectors.broker.segment import Segment, file_name, parse_name
from headrace.connectors.broker.settings import TopicSettings
from headrace.connectors.broker.storage import FileSlice, Storage, StorageError

_LARGEST_SEGMENT = 2**31 - 1


class Watcher(Protocol):
    """Wants to know when a log gets records or a transaction ends in it."""

    def changed(self, log: PartitionLog) -> None:
        """Called after the log has changed."""


class Aborted(NamedTuple):
    """An aborted transaction of `producer_id`: its records lie from `first` on, its marker at `last`."""

    producer_id: int
    first: int
    last: int


class PartitionLog:
    """One partition; `settings` may be replaced at any time. Offsets run from `start` to `end` (exclusive).

    `verify_tail` checks the last batch's checksum on opening; `kept` saves reading the files that it fits. Raises
    `StorageError` when the files cannot be opened.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        settings: TopicSettings,
        start: int = 0,
        verify_tail: bool = True,
        kept: KeptLog | None = None,
    ) -> None:
        self.storage = storage
        self.folder = folder
        self.settings = settings
        self.segments: list[Segment] = []
        self.start = start
        self.end = 0
        self.producers = ProducerStates()
        self.open_transactions: dict[int, int] = {}
        """Producer id to the first offset of its open transaction."""
        self.aborted: list[Aborted] = []
        self.watchers: set[Watcher] = set()
        self.deleted = False
        """Set when the topic is gone; nothing may be written any more."""
        self._bases: list[int] = []
        for base, end in self._current_files():
            self._add(Segment(storage, folder, base, end))
        if kept is None or not self._adopt(kept):
            self._load(verify_tail)
        self._set_bounds()

    # ---- opening

    def _load(self, verify_tail: bool) -> None:
        for segment in self.segments:
            is_last = segment is self.segments[-1]
            for header, content in segment.load(verify_tail and is_last):
                commit = batches.marker_commits(content) if header.is_control else None
                self._note(header, segment.covered_to is not None, commit)

    def kept(self) -> KeptLog:
        """What the next start needs to know, so that it does not have to load."""
        return KeptLog(
            [segment.kept() for segment in self.segments],
            self.producers.facts(),
            [list(entry) for entry in self.open_transactions.items()],
            [list(entry) for entry in self.aborted],
        )

    def _adopt(self, kept: KeptLog) -> bool:
        """Take over what a clean stop left; false when it is not of these files."""
        have = [(segment.base, segment.covered_to, segment.size) for segment in self.segments]
        if have != [(segment.base, segment.covered_to, segment.size) for segment in kept.segments]:
            return False
        for segment, known in zip(self.segments, kept.segments, strict=True):
            segment.adopt(known)
        self.producers = ProducerStates(kept.producers)
        self.open_transactions = dict(kept.open)
        self.aborted = [Aborted(*entry) for entry in kept.aborted]
        return True

    def _set_bounds(self) -> None:
        if self.segments:
            self.end = max(self.segments[-1].next_offset, self.start)
            self.start = max(self.start, self.segments[0].base)
        else:
            self.end = self.start

    def _current_files(self) -> list[tuple[int, int | None]]:
        """Names in use; a compacted file supersedes what lies inside its range, which is removed."""
        found = [parsed for name in self.storage.names(self.folder) if (parsed := parse_name(name)) is not None]
        current: list[tuple[int, int | None]] = []
        covered = -1
        for base, end in sorted(found, key=lambda f: (f[0], -(f[1] or 0))):
            if base < covered:
                self.storage.remove(f"{self.folder}/{file_name(base, end)}")
                continue
            current.append((base, end))
            covered = end if end is not None else covered
        return current

    def _add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self._bases.append(segment.base)

    def replace_segments(self, old: list[Segment], new: Segment) -> None:
        """Put a compacted segment where the neighbours `old` were; files are the caller's business."""
        at = self.segments.index(old[0])
        self.segments[at : at + len(old)] = [new]
        self._bases = [segment.base for segment in self.segments]
        dirty_from = next((segment.base for segment in self.segments if segment.covered_to is None), self.end)
        self.aborted = [entry for entry in self.aborted if entry.last >= dirty_from]

    def _note(self, header: Header, compacted: bool, commit: bool | None) -> None:
        """Follow one stored batch. In compacted segments every transaction is decided and aborted data is gone."""
        producer = header.producer_id
        if producer < 0:
            return
        self.producers.note(header, header.base_offset)
        if compacted or not header.is_transactional:
            return
        if header.is_control:
            first = self.open_transactions.pop(producer, None)
            if first is not None and not commit:
                self.aborted.append(Aborted(producer, first, header.base_offset))
        else:
            self.open_transactions.setdefault(producer, header.base_offset)

    # ---- writing

    def append(self, batch: bytearray | memoryview, now_ms: int) -> int:
        """Store one batch from a client, in place re-based; returns its base offset (the old one for a repeat).

        Raises `BrokerError` when the batch is refused (too large, malformed, out of sequence, fenced, no key on a
        compacted topic, disk full).
        """
        header = self._checked(batch)
        if header.producer_id >= 0:
            stored = self.producers.check(header)
            if stored is not None:
                return stored
        base = self.end
        batches.place(batch, base)
        self._write(batch, header._replace(base_offset=base), now_ms, None)
        return base

    def _checked(self, batch: bytearray | memoryview) -> Header:
        if len(batch) < batches.HEADER_SIZE:
            raise BrokerError(Code.CORRUPT_MESSAGE, f"a batch of {len(batch)} bytes")
        header = batches.read_header(batch)
        if header.magic != 2:
            raise BrokerError(Code.UNSUPPORTED_FOR_MESSAGE_FORMAT, f"message format {header.magic}, only 2 is stored")
        if header.size != len(batch):
            raise BrokerError(Code.INVALID_RECORD, "a produce request holds exactly one batch for each partition")
        if len(batch) > self.settings.max_message_bytes:
            limit = self.settings.max_message_bytes
            raise BrokerError(Code.MESSAGE_TOO_LARGE, f"{len(batch)} bytes, max.message.bytes is {limit}")
        if header.record_count < 1 or header.last_delta != header.record_count - 1 or header.is_control:
            raise BrokerError(Code.INVALID_RECORD, "count and offsets of the batch do not fit, or it is a marker")
        if self.settings.compacts:
            self._require_keys(batch, header)
        return header

    def _require_keys(self, batch: bytearray | memoryview, header: Header) -> None:
        try:
            content = batches.inflated(batch, header)
            if content is None:
                return
            if any(record.key is None for record in batches.records(content, header)):
                raise BrokerError(Code.INVALID_RECORD, f"{self.folder} is compacted: every record needs a key")
        except (ValueError, IndexError) as error:
            raise BrokerError(Code.CORRUPT_MESSAGE, str(error)) from error

    def append_marker(self, producer_id: int, epoch: int, commit: bool, now_ms: int) -> None:
        """End the open transaction of a producer here; raises `StorageError`. Nothing to do when none is open."""
        if producer_id not in self.open_transactions:
            return
        batch = batches.control_batch(producer_id, epoch, commit, now_ms)
        batches.place(batch, self.end)
        try:
            self._write(batch, batches.read_header(batch), now_ms, commit)
        except BrokerError as error:
            raise StorageError(error.reason) from error

    def _write(self, batch: bytearray | memoryview, header: Header, now_ms: int, commit: bool | None) -> None:
        try:
            self._writable(len(batch), now_ms).append(batch, header)
        except StorageError as error:
            raise BrokerError(Code.KAFKA_STORAGE_ERROR, str(error)) from error
        self.end = header.last_offset + 1
        self._note(header, False, commit)
        for watcher in tuple(self.watchers):
            watcher.changed(self)

    def _writable(self, size: int, now_ms: int) -> Segment:
        """The active segment, after rolling by segment.bytes or segment.ms."""
        if not self.segments or self.segments[-1].covered_to is not None:
            self._add(Segment(self.storage, self.folder, self.end))
        active = self.segments[-1]
        too_large = active.size + size > min(self.settings.segment_bytes, _LARGEST_SEGMENT)
        too_old = active.opened_ms is not None and now_ms - active.opened_ms > self.settings.segment_ms
        if len(active) and (too_large or too_old):
            active = self.roll()
        if active.opened_ms is None:
            active.opened_ms = now_ms
        return active

    def roll(self) -> Segment:
        """Close the active segment and start a new one at the end; raises `StorageError`."""
        if self.segments and self.segments[-1].base == self.end:
            return self.segments[-1]
        fresh = Segment(self.storage, self.folder, self.end)
        self._add(fresh)
        return fresh

    # ---- reading

    @property
    def last_stable_offset(self) -> int:
        """First offset of the oldest open transaction, else the end."""
        return min(self.open_transactions.values()) if self.open_transactions else self.end

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(segment.size for segment in self.segments)

    def read(self, offset: int, max_bytes: int, limit: int, at_least_one: bool) -> tuple[FileSlice, int] | None:
        """Whole batches from `offset` below `limit`, from one segment: (slice, next offset); None when none is there.

        The first batch may begin before `offset`, as in Kafka. `start <= offset <= end` is the caller's to check.
        """
        index = max(bisect_right(self._bases, offset) - 1, 0)
        while index < len(self.segments) and self._bases[index] < limit:
            segment = self.segments[index]
            if segment.next_offset > offset:
                found = segment.read(offset, max_bytes, limit, at_least_one)
                if segment.last_stored >= offset:
                    return found
            index += 1
        return None

    def aborted_between(self, first: int, after: int) -> list[tuple[int, int]]:
        """(producer id, first offset) of aborted transactions with records or marker in [first, after)."""
        if not self.aborted:
            return []
        at = bisect_left(self.aborted, first, key=lambda entry: entry.last)
        return [(entry.producer_id, entry.first) for entry in self.aborted[at:] if entry.first < after]

    def offset_for_timestamp(self, timestamp: int) -> tuple[int, int]:
        """(timestamp, offset) of the first record not older than `timestamp` ms; (-1, -1) when there is none.

        Exact where the batch can be read here (uncompressed, gzip, zstd), else the first offset of the batch.
        """
        for segment in self.segments:
            if segment.newest < timestamp or segment.next_offset <= self.start:
                continue
            found = self._search(segment, timestamp)
            if found is not None:
                return found
        return -1, -1

    def _search(self, segment: Segment, timestamp: int) -> tuple[int, int] | None:
        for batch in segment.batches_from(timestamp, self.start):
            header = batches.read_header(batch)
            if header.is_control:
                continue
            content = batches.inflated(batch, header)
            if content is None:
                return header.max_timestamp, max(header.base_offset, self.start)
            for record in batches.records(content, header):
                if record.timestamp >= timestamp and record.offset >= self.start:
                    return record.timestamp, record.offset
        return None

    def newest_record(self) -> tuple[int, int]:
        """(timestamp, offset) of the record with the largest timestamp, to the batch; (-1, -1) when empty."""
        newest = max(self.segments, key=lambda segment: segment.newest, default=None)
        return newest.newest_batch() if newest is not None else (-1, -1)

    # ---- deleting

    def advance_start(self, offset: int) -> None:
        """Forget records below `offset` (at most the end) and remove whole segments below it.

        Raises `StorageError` when the disk refuses the new segment.
        """
        self.start = max(self.start, offset)
        if self.segments and self.start >= self.end and len(self.segments[-1]):
            self.roll()
        self._drop_while(lambda segment: segment.next_offset <= self.start)

    def enforce_retention(self, now_ms: int) -> bool:
        """Remove old segments by retention.ms and retention.bytes; returns whether the start moved."""
        if not self.settings.deletes or not self.segments:
            return False
        before = self.start
        age = self.settings.retention_ms
        if age >= 0:
            active = self.segments[-1]
            if len(active) and all(now_ms - s.newest > age for s in self.segments) and not self.open_transactions:
                self.roll()
            self._drop_while(lambda segment: now_ms - segment.newest > age)
        allowed = self.settings.retention_bytes
        if allowed >= 0:
            self._drop_while(lambda segment: self.size - segment.size >= allowed)
        return self.start != before

    def _drop_while(self, condition: Callable[[Segment], bool]) -> None:
        """Remove segments from the front, never the last one."""
        while len(self.segments) > 1 and condition(self.segments[0]):
            gone = self.segments.pop(0)
            self._bases.pop(0)
            self.start = max(self.start, self.segments[0].base)
            self.storage.remove(gone.name)
        if self.aborted and self.aborted[0].last < self.start:
            self.aborted = [entry for entry in self.aborted if entry.last >= self.start]
