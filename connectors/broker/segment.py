"""One segment of a partition: a file of whole batches and the index of them that is kept in memory.

The index has 32 bytes a batch, in four arrays that bisect searches directly, and is rebuilt from headers at start.
The file's name says what it covers: `BASE.log` as written by clients, `BASE-END.log` when compaction has rewritten
offsets BASE to END - 1.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from headrace.connectors.broker.batches import HEADER_SIZE, Header, checksum_matches, read_header
from headrace.connectors.broker.kept_index import KeptSegment
from headrace.connectors.broker.storage import FileSlice, LogFile, Storage

_SCAN = 1 << 16
_PEEK = 128
_LARGEST_CHECKED = 8 << 20
_SMALLEST_LENGTH = HEADER_SIZE - 12


class Segment:
    """Batches with offsets from `base` on; `end` is set for compacted segments only, `name` while one is written."""

    def __init__(
        self, storage: Storage, folder: str, base: int, end: int | None = None, name: str | None = None
    ) -> None:
        self.base = base
        self.covered_to = end
        self.name = f"{folder}/{name or file_name(base, end)}"
        self.file: LogFile = storage.open(self.name)
        self.first_timestamp = -1
        self.opened_ms: int | None = None
        """Wall-clock time of the first append seen by this process."""
        self.newest = -1
        self.next_offset = base if end is None else end
        self._bases = array("q")
        self._lasts = array("q")
        self._positions = array("q")
        self._timestamps = array("q")

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.file.size

    @property
    def last_stored(self) -> int:
        """Last offset of the last batch, -1 when there is none."""
        return self._lasts[-1] if self._lasts else -1

    def __len__(self) -> int:
        return len(self._bases)

    def note(self, header: Header, position: int) -> None:
        """Enter a batch that lies at `position` into the index."""
        self._bases.append(header.base_offset)
        last = header.base_offset + header.last_delta
        self._lasts.append(last)
        self._positions.append(position)
        self._timestamps.append(header.max_timestamp)
        if self.first_timestamp < 0:
            self.first_timestamp = header.max_timestamp
        if header.max_timestamp > self.newest:
            self.newest = header.max_timestamp
        if last >= self.next_offset:
            self.next_offset = last + 1

    def append(self, batch: bytes | bytearray | memoryview, header: Header) -> None:
        """Write a batch whose offset is set already; raises `StorageError` and keeps nothing when it fails."""
        position = self.file.size
        self.file.append(batch)
        self.note(header, position)

    def load(self, verify_tail: bool) -> Iterator[tuple[Header, bytes]]:
        """Index what the file holds and yield each header with the first bytes behind it (marker content).

        Cuts the file where it stops making sense: a length that passes the end, a foreign magic, an offset that goes
        back, or, with `verify_tail`, a last batch whose checksum is wrong.
        """
        position = 0
        size = self.file.size
        window, window_at = b"", 0
        while position + HEADER_SIZE <= size:
            if position + HEADER_SIZE + 16 > window_at + len(window):
                batch_size = position // max(1, len(self))
                window, window_at = self.file.read(position, _SCAN if batch_size < _SCAN else _PEEK), position
            start = position - window_at
            header = read_header(window, start)
            sound = header.magic == 2 and header.length >= _SMALLEST_LENGTH and header.last_delta >= 0
            if not sound or header.base_offset < (self._lasts[-1] + 1 if self._lasts else self.base):
                break
            if position + header.size > size:
                break
            is_last = position + header.size + HEADER_SIZE > size
            if (
                verify_tail
                and is_last
                and header.size <= _LARGEST_CHECKED
                and not checksum_matches(self.file.read(position, header.size), header)
            ):
                break
            self.note(header, position)
            yield header, window[start : start + HEADER_SIZE + 16]
            position += header.size
        if position < size:
            self.file.truncate(position)

    def kept(self) -> KeptSegment:
        """The index, for the next start."""
        columns = self._bases, self._lasts, self._positions, self._timestamps
        return KeptSegment(self.base, self.covered_to, self.size, columns)

    def adopt(self, kept: KeptSegment) -> None:
        """Take over the index of this file instead of loading it."""
        self._bases, self._lasts, self._positions, self._timestamps = kept.columns
        self.first_timestamp = next((time for time in self._timestamps if time >= 0), -1)
        self.newest = max(self._timestamps, default=-1)
        self.next_offset = max(self.next_offset, self.last_stored + 1)

    def read(self, offset: int, max_bytes: int, limit: int, at_least_one: bool) -> tuple[FileSlice, int] | None:
        """Whole batches from the one that holds `offset` (or the next one) up to `limit`, at most `max_bytes`.

        Returns the slice and the offset after it; None when there is nothing. `at_least_one` lets a first batch larger
        than `max_bytes` through.
        """
        first = bisect_left(self._lasts, offset)
        end = bisect_left(self._bases, limit, first)
        if first >= end:
            return None
        start = self._positions[first]
        budget_end = start + max_bytes
        if self._end_of(end - 1) > budget_end:
            end = bisect_right(self._positions, budget_end, first, end) - 1
            if end <= first:
                if not at_least_one:
                    return None
                end = first + 1
        return FileSlice(self.file, start, self._end_of(end - 1) - start), self._lasts[end - 1] + 1

    def _end_of(self, index: int) -> int:
        return self._positions[index + 1] if index + 1 < len(self._positions) else self.file.size

    def batches_from(self, timestamp: int, offset: int) -> Iterator[bytes]:
        """Batches with a record not older than `timestamp` (milliseconds) and one at or after `offset`."""
        for index, newest in enumerate(self._timestamps):
            if newest >= timestamp and self._lasts[index] >= offset:
                yield self.batch(index)

    def newest_batch(self) -> tuple[int, int]:
        """(timestamp, last offset) of the batch with the largest timestamp; (-1, -1) when empty."""
        if not self._bases:
            return -1, -1
        index = self._timestamps.index(self.newest)
        return self.newest, self._lasts[index]

    def batch(self, index: int) -> bytes:
        """All bytes of the batch at `index`."""
        start = self._positions[index]
        return self.file.read(start, self._end_of(index) - start)


def file_name(base: int, end: int | None) -> str:
    """The name of a segment's file; sorts by base offset."""
    return f"{base:020d}.log" if end is None else f"{base:020d}-{end:020d}.log"


def parse_name(name: str) -> tuple[int, int | None] | None:
    """(base, end) of a segment's file name, None for other files."""
    stem, dot, suffix = name.rpartition(".")
    if not dot or suffix != "log":
        return None
    base, dash, end = stem.partition("-")
    try:
        return int(base), int(end) if dash else None
    except ValueError:
        return None
