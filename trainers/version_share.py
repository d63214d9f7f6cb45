"""One rank's share of a version: its run of segments, the committed bytes it diffs against, the objects it uploads.

Goes in: the bytes of the rank's segments and what rank 0 decided about the version; comes out: a report for the
manifest. The share's baseline is replaced only when rank 0 says that the version was committed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.connectors.stores.shards import ShardWriter
from headrace.connectors.stores.store import ObjectStore
from headrace.schemas.delta_layout import Layout
from headrace.schemas.delta_manifest import CommittedVersion, DeltaKeys, ShardRef
from headrace.schemas.delta_steps import Kernels

__all__ = ("Draft", "ShareReport", "VersionShare", "share_of")


@dataclass(frozen=True, slots=True)
class Draft:
    """What rank 0 decided about a version: numbers, parent, which objects to upload, the name of the try."""

    version: int
    parent: CommittedVersion | None
    delta: bool
    full: bool
    newest_full: int
    attempt: str


@dataclass(frozen=True, slots=True)
class ShareReport:
    """What a rank uploaded: objects, digests of its new segments in order, changed elements of every tensor."""

    rank: int
    delta: tuple[ShardRef, ...]
    full: tuple[ShardRef, ...]
    digests: tuple[bytes, ...]
    changed: tuple[int, ...]


def share_of(layout: Layout, rank: int, ranks: int) -> range:
    """The segments of a rank: contiguous runs of about equal bytes, all of them together the whole image."""
    bounds = [round(layout.nbytes * n / ranks) for n in (rank, rank + 1)]
    starts = [segment.offset for segment in layout.segments]
    low, high = (int(np.searchsorted(starts, bound)) for bound in bounds)
    return range(low, high if rank + 1 < ranks else len(starts))


class VersionShare:
    """The share of ``rank`` among ``ranks``. Holds two copies of its bytes: the baseline and the next version."""

    def __init__(
        self,
        store: ObjectStore,
        keys: DeltaKeys,
        layout: Layout,
        *,
        rank: int = 0,
        ranks: int = 1,
        context: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        self._keys = keys
        self._layout = layout
        self._rank = rank
        self.segments = share_of(layout, rank, ranks)
        self._writer = ShardWriter(store, layout, rank=rank, ranks=ranks, context=context, kernels=kernels)
        self._digests: Sequence[bytes] = ()
        self._baseline: NDArray[np.uint8] | None = None
        self._draft: tuple[NDArray[np.uint8], Sequence[bytes]] | None = None
        self._spare: NDArray[np.uint8] | None = None
        self.version: CommittedVersion | None = None
        """The committed version that the next delta is made against."""

    @property
    def span(self) -> slice:
        """The bytes of the image that are this rank's."""
        if not self.segments:
            return slice(0, 0)
        last = self._layout.segments[self.segments[-1]]
        return slice(self._layout.segments[self.segments[0]].offset, last.offset + last.nbytes)

    def room(self) -> NDArray[np.uint8]:
        """The bytes to write the next version to: uint8, as long as ``span``; gaps between tensors stay zero."""
        if self._spare is None:
            span = self.span
            self._spare = np.zeros(span.stop - span.start, np.uint8)
        return self._spare

    def seed(self, version: CommittedVersion, image: NDArray[np.uint8], digests: Sequence[bytes]) -> None:
        """Take a committed version as baseline. image, digests: of the whole model."""
        self.seed_share(version, image[self.span], digests[self.segments.start : self.segments.stop])

    def seed_share(self, version: CommittedVersion, data: NDArray[np.uint8], digests: Sequence[bytes]) -> None:
        """The same from the bytes and digests of this rank's segments alone."""
        self._baseline, self._digests = data, digests
        self.version, self._draft = version, None

    def drafted(self) -> bool:
        """Whether what is in ``room`` is what was uploaded last and not yet promoted."""
        return self._draft is not None and np.array_equal(self._draft[0], self.room())

    def upload(self, draft: Draft) -> ShareReport:
        """Code and upload what is in ``room``; the room is taken until ``promote`` or ``give_up``."""
        data = self.room()
        old = self._baseline if draft.parent is not None else None
        coded = self._writer.code(self.segments, data, old, self._digests)
        rows = [one.row for one in coded]
        delta: tuple[ShardRef, ...] = ()
        full: tuple[ShardRef, ...] = ()
        if draft.delta and draft.parent is not None:
            delta = self._writer.upload_delta(
                draft.version, draft.parent.version, rows, lambda part: self._key("delta", draft, part)
            )
        if draft.full:
            full = self._writer.upload_full(draft.version, rows, data, lambda part: self._key("full", draft, part))
        digests = tuple(row.digest for row in rows)
        self._draft, self._spare = (data, digests), None
        return ShareReport(self._rank, delta, full, digests, self._changed([one.counts for one in coded]))

    def promote(self, version: CommittedVersion) -> None:
        """Make what was uploaded the baseline: it was committed as ``version``."""
        if self._draft is None:
            raise ValueError(f"version {version.version} was never uploaded here")
        before, self._baseline = self._baseline, self._draft[0]
        self._digests, self._draft, self.version = self._draft[1], None, version
        if self._spare is None and before is not None and before.flags.writeable:
            self._spare = before

    def give_up(self) -> None:
        """Forget what was uploaded: it will never be committed. What was put into a new room since stays."""
        if self._draft is not None:
            self._spare, self._draft = self._draft[0] if self._spare is None else self._spare, None

    def _key(self, kind: str, draft: Draft, part: int) -> str:
        return self._keys.shard(kind, draft.version, draft.attempt, self._rank, part)

    def _changed(self, counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Changed elements by tensor, from those by piece of every segment."""
        changed = [0] * len(self._layout.tensors)
        for number, here in zip(self.segments, counts, strict=True):
            for piece, count in zip(self._layout.pieces[number], here, strict=True):
                changed[piece.tensor] += count
        return tuple(changed)
