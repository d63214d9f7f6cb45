"""Log compaction: keeps the newest record of each key, in small steps so that clients hardly wait.

In: a log whose settings compact. Out: its sealed segments rewritten without superseded records, aborted data, commit
markers, and, `delete.retention.ms` after compaction first passed them, without tombstones and abort markers. Offsets
never change, the active segment and anything at or above the last stable offset are left alone, and a rewritten
segment replaces its predecessors in one rename, so a kill at any point leaves one of the two. The newest batch of each
producer stays, without records if need be: its sequence number is what the producer's next batch is checked against.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.connectors.broker import batches
from headrace.connectors.broker.batches import Header
from headrace.connectors.broker.log import PartitionLog
from headrace.connectors.broker.segment import Segment, file_name
from headrace.connectors.broker.topics import Cleanings

_TEMPORARY = "compaction.tmp"
_PRODUCER_MS = 86_400_000
"""Age at which the sequence number of a silent producer is forgotten (Kafka's producer.id.expiration.ms)."""


def cleanable(log: PartitionLog, now_ms: int) -> list[Segment]:
    """The sealed segments from the front that compaction may touch now."""
    stable = log.last_stable_offset
    lag = log.settings.min_compaction_lag_ms
    found = []
    for segment, following in zip(log.segments, log.segments[1:], strict=False):
        if following.base > stable or (lag > 0 and now_ms - segment.newest < lag):
            break
        found.append(segment)
    return found


def urgency(log: PartitionLog, now_ms: int) -> float:
    """How much a pass is due: the share of dirty bytes, 0 when no pass is due yet, 1 when the lag is over."""
    if not log.settings.compacts or len(log.segments) < 2:
        return 0.0
    dirty = clean = 0
    oldest: int | None = None
    for segment in cleanable(log, now_ms):
        if segment.covered_to is not None:
            clean += segment.size
        elif len(segment):
            dirty += segment.size
            oldest = segment.first_timestamp if oldest is None else oldest
    if oldest is None:
        return 0.0
    if now_ms - oldest > log.settings.max_compaction_lag_ms:
        return 1.0
    share = dirty / (dirty + clean)
    return share if share >= log.settings.min_dirty_ratio else 0.0


class Compaction:
    """One pass over one log. `cleanings` tells since when offsets have been behind compaction (see `Topics`)."""

    def __init__(self, log: PartitionLog, cleanings: Cleanings, now_ms: int) -> None:
        self._log = log
        self._segments = cleanable(log, now_ms)
        self._now_ms = now_ms
        self._cleanings = cleanings
        self._newest: dict[bytes, int] = {}
        self._aborted: dict[int, list[tuple[int, int]]] = {}
        for producer_id, first, last in log.aborted:
            self._aborted.setdefault(producer_id, []).append((first, last))
        self._settled_below = self._settled(cleanings)

    def _settled(self, cleanings: Cleanings) -> int:
        """Offsets below this have been behind compaction for longer than delete.retention.ms."""
        retention = self._log.settings.delete_retention_ms
        return max((offset for offset, at in cleanings if at + retention <= self._now_ms), default=0)

    def passed(self) -> Cleanings:
        """The cleanings after this pass: its end added, what no longer matters removed."""
        end = self._log.segments[len(self._segments)].base if self._segments else 0
        kept = [(offset, at) for offset, at in self._cleanings if offset >= self._settled_below]
        return [*kept, (end, self._now_ms)] if not kept or kept[-1][0] < end else kept

    def steps(self) -> Iterator[None]:
        """Do the pass, a batch at a time; raises `StorageError` when the disk refuses a rewritten segment.

        Stops early, leaving the log as it was, when segments of the pass have been deleted meanwhile.
        """
        for segment in self._segments:
            if segment.covered_to is None:
                for index in range(len(segment)):
                    self._learn(segment.batch(index))
                    yield
        group: list[Segment] = []
        output: Segment | None = None
        for segment in self._segments:
            if output is not None and output.size + segment.size > self._log.settings.segment_bytes:
                self._install(group, output)
                group, output = [], None
            if output is None:
                self._log.storage.remove(f"{self._log.folder}/{_TEMPORARY}")
                output = Segment(self._log.storage, self._log.folder, segment.base, name=_TEMPORARY)
            group.append(segment)
            for index in range(len(segment)):
                if self._log.deleted or segment not in self._log.segments:
                    return
                self._copy(segment.batch(index), output)
                yield
        if output is not None:
            self._install(group, output)

    def _learn(self, batch: bytes) -> None:
        """Note the offset of each key in a dirty batch."""
        header = batches.read_header(batch)
        if header.is_control or self._is_aborted(header):
            return
        for record in _readable(batch, header) or ():
            if record.key is not None:
                self._newest[record.key] = record.offset

    def _is_aborted(self, header: Header) -> bool:
        if not header.is_transactional:
            return False
        spans = self._aborted.get(header.producer_id, ())
        return any(first <= header.base_offset <= last for first, last in spans)

    def _copy(self, batch: bytes, output: Segment) -> None:
        """Write what survives of a batch; batches that cannot be read here survive whole."""
        header = batches.read_header(batch)
        if header.is_control:
            if not batches.marker_commits(batch) and header.base_offset >= self._settled_below:
                output.append(batch, header)
            return
        records = [] if self._is_aborted(header) else _readable(batch, header)
        if records is None:
            output.append(batch, header)
            return
        kept = [record for record in records if self._survives(record)]
        if kept and len(kept) == header.record_count:
            output.append(batch, header)
        elif kept or self._holds_sequence(header):
            rebuilt = batches.rebuilt(header, kept)
            output.append(rebuilt, batches.read_header(rebuilt))

    def _holds_sequence(self, header: Header) -> bool:
        """Whether a batch is the newest of a producer that may still write."""
        newest = self._log.producers.newest_batch(header.producer_id)
        return newest == header.base_offset and self._now_ms - header.max_timestamp <= _PRODUCER_MS

    def _survives(self, record: batches.Record) -> bool:
        if record.key is None:
            return False
        if self._newest.get(record.key, -1) > record.offset:
            return False
        return record.has_value or record.offset >= self._settled_below

    def _install(self, group: list[Segment], output: Segment) -> None:
        """Put the rewritten segment in the place of its predecessors."""
        log = self._log
        if log.deleted or any(segment not in log.segments for segment in group):
            return
        following = log.segments[log.segments.index(group[-1]) + 1]
        name = f"{log.folder}/{file_name(output.base, following.base)}"
        log.storage.rename(output.name, name)
        output.name, output.covered_to, output.next_offset = name, following.base, following.base
        log.replace_segments(group, output)
        for segment in group:
            if segment.name != name:
                log.storage.remove(segment.name)


def _readable(batch: bytes, header: Header) -> list[batches.Record] | None:
    """The records of a batch; None when they are in a codec that is not read here, or damaged."""
    try:
        content = batches.inflated(batch, header)
        return None if content is None else list(batches.records(content, header))
    except (ValueError, IndexError):
        return None
