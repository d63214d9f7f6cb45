"""Makes and uploads the objects of a version: what publishers and the compactor share.

Goes in: old and new bytes of segments; comes out: coded rows, and the rows of uploaded objects for a manifest. Objects
hold at most about 64 MB, so nothing larger is ever in memory or in one request.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.connectors.stores.store import ObjectStore
from headrace.schemas.delta_codec import Frame, encode_dense, encode_segment
from headrace.schemas.delta_layout import Layout
from headrace.schemas.delta_manifest import ShardRef
from headrace.schemas.delta_shard import DELTA, FULL, SegmentFrames, digest_of, pack_shard
from headrace.schemas.delta_steps import Kernels, kernels_for

__all__ = ("Coded", "ShardWriter")

_PART = 64 << 20
_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Coded:
    """A segment's delta frames (none without an old one or a change), new digest and changed elements by piece."""

    row: SegmentFrames
    counts: Sequence[int]


class ShardWriter:
    """Codes segments of one layout on several threads, and uploads them as the objects of ``rank`` among ``ranks``.

    context: code deltas by old exponent where that is smaller. kernels: what compares and codes (None: the fastest on
    this CPU).
    """

    def __init__(
        self,
        store: ObjectStore,
        layout: Layout,
        *,
        rank: int = 0,
        ranks: int = 1,
        context: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        self._store = store
        self._layout = layout
        self._rank, self._ranks = rank, ranks
        self._context = context
        self._kernels: Kernels = kernels or kernels_for(layout.nbytes)
        self._map = ThreadPoolExecutor(_THREADS, "encode").map if len(layout.segments) > 1 else map

    def code(
        self, segments: Iterable[int], new: NDArray[np.uint8], old: NDArray[np.uint8] | None, digests: Sequence[bytes]
    ) -> list[Coded]:
        """The change of segments. new, old: their bytes, contiguous from the first of them on (uint8).

        digests: those of the old segments, in the same order; taken over where nothing changed.
        """
        numbers = list(segments)
        begin = self._layout.segments[numbers[0]].offset if numbers else 0

        def one(number: int) -> Coded:
            segment, pieces = self._layout.segments[number], self._layout.pieces[number]
            mine = slice(segment.offset - begin, segment.offset - begin + segment.nbytes)
            after = _elements(new[mine], segment.width)
            if old is None:
                frames: list[Frame] = []
                counts = [piece.stop - piece.start for piece in pieces]
            else:
                before = _elements(old[mine], segment.width)
                frames, counts = encode_segment(before, after, pieces, self._kernels, context=self._context)
            digest = digests[number - numbers[0]] if old is not None and not frames else digest_of(after)
            return Coded(SegmentFrames(number, digest, frames), counts)

        return list(self._map(one, numbers))

    def upload_delta(
        self, version: int, parent: int, rows: Sequence[SegmentFrames], key: Callable[[int], str]
    ) -> tuple[ShardRef, ...]:
        """Upload coded rows (at least one object, even when nothing changed). key: from the object's number."""
        changed = [row for row in rows if row.frames]
        parts = list(_parts(changed, [sum(len(frame.payload) for frame in row.frames) for row in changed])) or [[]]
        return tuple(
            self._map(lambda number: self._put(DELTA, version, parent, parts[number], key(number)), range(len(parts)))
        )

    def upload_full(
        self, version: int, rows: Sequence[SegmentFrames], new: NDArray[np.uint8], key: Callable[[int], str]
    ) -> tuple[ShardRef, ...]:
        """Upload whole segments; only a few objects are in memory at once. new: as for ``code``."""
        begin = self._layout.segments[rows[0].index].offset if rows else 0
        parts = list(_parts(rows, [self._layout.segments[row.index].nbytes for row in rows]))

        def one(number: int) -> ShardRef:
            whole: list[SegmentFrames] = []
            for row in parts[number]:
                segment = self._layout.segments[row.index]
                at = segment.offset - begin
                payload = encode_dense(_elements(new[at : at + segment.nbytes], segment.width))
                whole.append(SegmentFrames(row.index, row.digest, (Frame(0, segment.count, payload),)))
            return self._put(FULL, version, -1, whole, key(number))

        return tuple(self._map(one, range(len(parts))))

    def _put(self, kind: int, version: int, parent: int, rows: Sequence[SegmentFrames], key: str) -> ShardRef:
        body, head = pack_shard(kind, version, parent, self._layout, rows, self._rank, self._ranks)
        self._store.put(key, body)
        return ShardRef(key, len(body), head, digest_of(memoryview(body)[:head]).hex())


def _elements(octets: NDArray[np.uint8], width: int) -> NDArray[Any]:
    return octets.view(np.dtype(f"<u{width}"))


def _parts(rows: Sequence[SegmentFrames], sizes: Sequence[int]) -> Iterator[list[SegmentFrames]]:
    """Rows in runs of about 64 MB."""
    run: list[SegmentFrames] = []
    total = 0
    for row, size in zip(rows, sizes, strict=True):
        if run and total + size > _PART:
            yield run
            run, total = [], 0
        run.append(row)
        total += size
    if run:
        yield run
