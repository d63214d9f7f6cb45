"""Publishes weights: what a step made becomes a committed version in the object store.

Goes in: the raw bits of all weights; comes out: objects under keys that nobody writes twice, and a manifest whose
create-only put is the commit. The baseline of the next delta is replaced only after that commit, so a publish that
fails, is repeated or loses a race never lets store and trainer disagree.
"""

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from headrace.connectors.stores.chain import Chain, Link
from headrace.connectors.stores.image import load_image
from headrace.connectors.stores.store import AlreadyExists, ObjectStore, StoreError
from headrace.schemas.delta_codec import Frame, encode_dense, encode_segment
from headrace.schemas.delta_layout import DeltaError, Layout, LayoutMismatch, Segment
from headrace.schemas.delta_manifest import CommittedVersion, ShardRef, WeightManifest
from headrace.schemas.delta_shard import DELTA, FULL, SegmentFrames, digest_of, pack_shard, root_of
from headrace.schemas.delta_steps import kernels_for

__all__ = ("DeltaPublisher", "VersionTaken")

_THREADS = min(8, os.cpu_count() or 1)
_HINT_EVERY = 16


class VersionTaken(DeltaError):
    """Another writer committed the version first. ``head`` is what it committed; protocol 8 says how to go on."""

    def __init__(self, message: str, head: CommittedVersion) -> None:
        super().__init__(message)
        self.head = head


@dataclass(slots=True)
class _Baseline:
    """The weights of a committed version: what the next delta is made against."""

    version: CommittedVersion
    data: NDArray[np.uint8]
    digests: list[bytes]


@dataclass(slots=True)
class _Attempt:
    """A publish that is uploaded and not known to be committed; the same call repeated only repeats the commit."""

    same: tuple[object, ...]
    data: NDArray[np.uint8]
    digests: list[bytes]
    manifest: WeightManifest


class DeltaPublisher:
    """Publishes the versions of one policy.

    layout: the table of its weights. full_every: a full goes beside the delta when the newest full is this many
    versions old. context: code deltas by old exponent where that is smaller (for slow links: a third fewer bytes at
    less than half the speed). Holds two images of the weights on the host. Calls come from one thread at a time.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        policy: str,
        layout: Layout,
        full_every: int = 20,
        *,
        context: bool = False,
    ) -> None:
        self._store = store
        self._chain = Chain(store, run, policy)
        self._layout = layout
        self._full_every = full_every
        self._context = context
        self._kernels = kernels_for(layout.nbytes)
        self._baseline: _Baseline | None = None
        self._attempt: _Attempt | None = None
        self._spare: NDArray[np.uint8] | None = None
        self._map = ThreadPoolExecutor(_THREADS, "encode").map if len(layout.segments) > 1 else map
        self._layout_stored = False

    @property
    def baseline(self) -> CommittedVersion | None:
        """The committed version that the next delta is made against; None before the first."""
        return self._baseline.version if self._baseline else None

    def head(self) -> CommittedVersion | None:
        """The newest committed version in the store, None when there is none. Raises the store's errors."""
        known = self._baseline.version.version if self._baseline else -1
        return self._chain.head(known)

    def committed(self, version: int) -> CommittedVersion:
        """A committed version of this policy. Raises NoSuchKey, DeltaCorrupt and the store's errors."""
        return self._chain.committed(version)

    def load_baseline(self, version: CommittedVersion | int) -> dict[str, NDArray[Any]]:
        """Rebuild a committed version from the store and make it the baseline; returns its weights, read-only views.

        Raises LayoutMismatch when it has another layout, MissingLink, NoSuchKey and the store's errors.
        """
        number = version if isinstance(version, int) else version.version
        image = load_image(self._chain, number)
        committed = self._chain.committed(number)
        if isinstance(version, CommittedVersion) and version.manifest_sha256 != committed.manifest_sha256:
            raise DeltaError(
                f"{self._store.url}: version {number} has manifest {committed.manifest_sha256}, "
                f"not {version.manifest_sha256}; read the head again"
            )
        if image.layout.digest != self._layout.digest:
            raise LayoutMismatch(
                f"version {number} has layout {image.layout.digest}, the model has {self._layout.digest}: "
                "another architecture or dtype was trained under this run id and policy"
            )
        self._baseline = _Baseline(committed, image.data, list(image.digests))
        self._attempt = None
        return self._layout.views(image.data)

    def publish(
        self,
        weights: Mapping[str, NDArray[Any]],
        *,
        version: int,
        lineage: int,
        batch: int,
        parent: CommittedVersion | None,
        kind: Literal["full", "delta"] | None = None,
    ) -> CommittedVersion:
        """Upload and commit a version.

        weights: name -> raw bits (uint16 for bfloat16) of the tensor's shape. version: above the parent's. parent: the
        committed head; the baseline is loaded from the store if it is another version. kind: ``delta`` or ``full``
        alone; None is a delta where there is a parent, with a full beside it when one is due. When it raises a store
        error the same call may be repeated; a commit that had succeeded unseen is then found and returned. Raises
        VersionTaken when another writer has committed ``version``, LayoutMismatch, ValueError.
        """
        if version <= (parent.version if parent else -1):
            raise ValueError(f"version {version} does not follow its parent {parent.version if parent else None}")
        if parent is None and kind == "delta":
            raise ValueError("a delta needs a parent")
        if parent is not None and (self._baseline is None or self._baseline.version != parent):
            self.load_baseline(parent)
        data = self._layout.image() if self._spare is None else self._spare
        self._spare = data
        self._layout.fill(data, weights)
        same = (version, lineage, batch, parent, kind)
        if self._attempt is None or self._attempt.same != same or not np.array_equal(self._attempt.data, data):
            manifest, digests = self._uploaded(data, version, lineage, batch, parent, kind)
            self._attempt = _Attempt(same, data, digests, manifest)
            self._spare = None
        return self._commit(self._attempt)

    def _uploaded(
        self,
        data: NDArray[np.uint8],
        version: int,
        lineage: int,
        batch: int,
        parent: CommittedVersion | None,
        kind: str | None,
    ) -> tuple[WeightManifest, list[bytes]]:
        """Encode and upload the objects of a version; its manifest, not committed, and its segments' digests."""
        base = self._baseline if parent is not None else None
        coded = list(self._map(lambda segment: self._coded(segment, data, base), self._layout.segments))
        digests = [row.digest for row, _ in coded]
        newest_full = (
            self._chain.link(parent.version, parent.manifest_sha256).manifest.newest_full if parent else version
        )
        due = kind == "full" or parent is None or (kind is None and version - newest_full >= self._full_every)
        attempt = f"{lineage}-{uuid.uuid4().hex[:16]}"
        delta: tuple[ShardRef, ...] = ()
        full: tuple[ShardRef, ...] = ()
        if parent is not None and kind != "full":
            rows = [row for row, _ in coded if row.frames]
            delta = (self._upload("delta", version, attempt, parent.version, rows),)
        if due:
            rows = list(self._map(lambda row: self._whole(row, data), [row for row, _ in coded]))
            full = (self._upload("full", version, attempt, -1, rows),)
        manifest = WeightManifest(
            version=version,
            lineage=lineage,
            batch=batch,
            parent=parent.version if parent else -1,
            parent_sha256=parent.manifest_sha256 if parent else "",
            root_digest=root_of(digests),
            layout_digest=self._layout.digest,
            newest_full=version if full else newest_full,
            delta=delta,
            full=full,
            changed=self._changed([counts for _, counts in coded]),
            elements=sum(tensor.size for tensor in self._layout.tensors),
            attempt=attempt,
            published_ms=int(time.time() * 1000),
        )
        return manifest, digests

    def _coded(
        self, segment: Segment, data: NDArray[np.uint8], base: _Baseline | None
    ) -> tuple[SegmentFrames, list[int]]:
        """A segment's delta frames (none without a base or a change), new digest and changed elements by piece."""
        new = self._layout.elements(data, segment)
        pieces = self._layout.pieces[segment.index]
        if base is None:
            return SegmentFrames(segment.index, digest_of(new), ()), [piece.stop - piece.start for piece in pieces]
        old = self._layout.elements(base.data, segment)
        frames, counts = encode_segment(old, new, pieces, self._kernels, context=self._context)
        digest = digest_of(new) if frames else base.digests[segment.index]
        return SegmentFrames(segment.index, digest, frames), counts

    def _whole(self, row: SegmentFrames, data: NDArray[np.uint8]) -> SegmentFrames:
        segment = self._layout.segments[row.index]
        payload = encode_dense(self._layout.elements(data, segment))
        return SegmentFrames(row.index, row.digest, (Frame(0, segment.count, payload),))

    def _upload(self, kind: str, version: int, attempt: str, parent: int, rows: Sequence[SegmentFrames]) -> ShardRef:
        number = FULL if kind == "full" else DELTA
        body, head = pack_shard(number, version, parent, self._layout, rows)
        key = self._chain.keys.shard(kind, version, attempt, rank=0)
        self._store.put(key, body)
        return ShardRef(key, len(body), head, digest_of(memoryview(body)[:head]).hex())

    def _changed(self, counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Changed elements by tensor, from those by piece of every segment."""
        changed = [0] * len(self._layout.tensors)
        for pieces, here in zip(self._layout.pieces, counts, strict=True):
            for piece, count in zip(pieces, here, strict=True):
                changed[piece.tensor] += count
        return tuple(changed)

    def _commit(self, attempt: _Attempt) -> CommittedVersion:
        """Create the manifest, then make the attempt the baseline."""
        keys, manifest = self._chain.keys, attempt.manifest
        body, sha256 = manifest.to_bytes()
        if not self._layout_stored:
            with suppress(AlreadyExists):
                self._store.put(keys.layout(self._layout.digest), self._layout.to_bytes(), create_only=True)
            self._layout_stored = True
        try:
            self._store.put(keys.manifest(manifest.version), body, create_only=True)
        except AlreadyExists:
            link = self._chain.link(manifest.version)
            if link.manifest.attempt != manifest.attempt:
                self._attempt, self._spare = None, attempt.data
                self._refuse(manifest)
        committed = manifest.committed(keys, sha256)
        self._chain.remember(Link(manifest, sha256))
        before, self._attempt = self._baseline, None
        self._baseline = _Baseline(committed, attempt.data, attempt.digests)
        if self._spare is None and before is not None and before.data.flags.writeable:
            self._spare = before.data
        if manifest.full or manifest.version % _HINT_EVERY == 0:
            with suppress(StoreError):  # A hint: it only shortens the listing of a reader that starts.
                self._store.put(keys.latest, str(manifest.version).encode())
        return committed

    def _refuse(self, manifest: WeightManifest) -> NoReturn:
        head = self._chain.head(manifest.version)
        taken = self._chain.committed(manifest.version)
        raise VersionTaken(
            f"{self._store.url}: version {manifest.version} of {self._chain.keys.root} was committed by attempt "
            f"{taken.attempt} (lineage {taken.lineage}, batch {taken.batch}), not by this writer's {manifest.attempt}",
            head or taken,
        )
