"""What a clean stop leaves for the next start: the indexes of all segments, so that no log has to be read through.

One file, which is the mark of the clean stop too: a line of JSON that says of each partition which files it has, how
long they are and what is known of its producers and transactions; behind it the segments' indexes as plain arrays. It
is taken away before anything is written, so a killed broker leaves none and the next one reads the logs. What does not
fit the files that are there is not believed, each partition for itself.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from headrace.connectors.broker.log import PartitionLog

__all__ = ("KeptLog", "KeptSegment", "leave", "take")

_NAME = "clean-stop"
_FORM = f"1 {sys.byteorder}"
"""Another form, or one of another machine, is read as a mark alone."""


class KeptSegment(NamedTuple):
    """One segment: base and end as in its file's name, bytes, and its index (bases, lasts, positions, timestamps)."""

    base: int
    covered_to: int | None
    size: int
    columns: tuple[array[int], ...]


class KeptLog(NamedTuple):
    """One partition; ``producers``, ``open`` and ``aborted`` as their owners write them."""

    segments: list[KeptSegment]
    producers: list[Any]
    open: list[Any]
    aborted: list[list[int]]


def leave(data: Path, logs: Iterable[PartitionLog]) -> None:
    """Write the mark of a clean stop; without the indexes when the disk does not take them."""
    blobs: list[bytes] = []
    told = {}
    for log in logs:
        kept = log.kept()
        segments = []
        for segment in kept.segments:
            blobs += (column.tobytes() for column in segment.columns)
            segments.append([segment.base, segment.covered_to, segment.size, len(segment.columns[0])])
        told[log.folder] = [segments, kept.producers, kept.open, kept.aborted]
    fresh = data / f"{_NAME}.new"
    try:
        fresh.write_bytes(b"\n".join((json.dumps([_FORM, told]).encode(), b"".join(blobs))))
        fresh.replace(data / _NAME)
    except OSError:
        fresh.unlink(missing_ok=True)
        (data / _NAME).touch()


def take(data: Path) -> Mapping[str, KeptLog] | None:
    """What a clean stop has left, by folder of the partition, and take it away; None when there was none."""
    mark = data / _NAME
    try:
        content = mark.read_bytes()
    except FileNotFoundError:
        return None
    mark.unlink()
    line, _, blob = content.partition(b"\n")
    try:
        form, told = json.loads(line)
        return dict(_logs(told, blob)) if form == _FORM else {}
    except (ValueError, TypeError):
        return {}


def _logs(told: Mapping[str, Any], blob: bytes) -> Iterator[tuple[str, KeptLog]]:
    """Raises ValueError when the file is not whole."""
    view, at = memoryview(blob), 0
    for folder, (segments, producers, open_, aborted) in told.items():
        kept = []
        for base, covered_to, size, count in segments:
            columns = []
            for _ in range(4):
                column = array("q")
                column.frombytes(view[at : at + count * column.itemsize])
                if len(column) != count:
                    raise ValueError("the file is cut off")
                at += count * column.itemsize
                columns.append(column)
            kept.append(KeptSegment(base, covered_to, size, tuple(columns)))
        yield folder, KeptLog(kept, producers, open_, aborted)
