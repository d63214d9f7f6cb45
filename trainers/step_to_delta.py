"""Publishes weights: what a step made becomes a committed version in the object store.

Goes in: the raw bits of all weights; comes out: objects under keys that nobody writes twice, and a manifest whose
create-only put is the commit. The baseline of the next delta is replaced only after that commit, so a publish that
fails, is repeated or loses a race never lets store and trainer disagree.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from numpy.typing import NDArray

from headrace.connectors.stores.chain import Chain, Link
from headrace.connectors.stores.fenced import FencedStore
from headrace.connectors.stores.image import load_image
from headrace.connectors.stores.sparsity import changed_by_role
from headrace.connectors.stores.store import AlreadyExists, ObjectStore, StoreError
from headrace.schemas.delta_layout import DeltaError, Layout, LayoutMismatch
from headrace.schemas.delta_manifest import CommittedVersion, ShardRef, WeightManifest, check_manifest
from headrace.schemas.delta_shard import root_of
from headrace.schemas.delta_steps import Kernels
from headrace.trainers.version_share import Draft, ShareReport, VersionShare

__all__ = ("Attempt", "DeltaPublisher", "VersionCommits", "VersionTaken", "settled")

_HINT_EVERY = 16
_ANNOUNCED = 64 << 10
_STALE_AFTER = 1800.0
_TOO_MANY_VERSIONS = 10**12


class VersionTaken(DeltaError):
    """Another writer committed the version first. ``head`` is what it committed; protocol 8 says how to go on."""

    def __init__(self, message: str, head: CommittedVersion) -> None:
        super().__init__(message)
        self.head = head

    def __reduce__(self) -> tuple[type["VersionTaken"], tuple[str, CommittedVersion]]:
        """Pickled with its head, so that ranks can pass it on."""
        return VersionTaken, (str(self), self.head)


Kind = Literal["full", "delta"] | None


class VersionCommits:
    """Rank 0's part of publishing: decides what a version consists of, and commits it by creating its manifest.

    full_every: a full goes beside the delta when the newest full is this many versions old. It touches no weights, so
    it serves one rank as well as many. Raises LayoutMismatch for a model without weights.
    """

    def __init__(self, store: ObjectStore, run: str, policy: str, layout: Layout, full_every: int = 20) -> None:
        if not layout.nbytes:
            raise LayoutMismatch(f"policy {policy} of run {run} has no weights to publish: its layout has no elements")
        self.chain = Chain(store, run, policy)
        self._store = store
        self._layout = layout
        self._full_every = full_every
        self._layout_stored = False

    def head(self, known: CommittedVersion | None = None) -> CommittedVersion | None:
        """The newest committed version in the store, None when there is none; known: one that is committed."""
        return self.chain.head(known.version if known else -1)

    def refuse_other_layout(self, link: Link) -> None:
        """Raise LayoutMismatch unless a version has this model's layout."""
        found = link.manifest.layout_digest
        if found != self._layout.digest:
            raise LayoutMismatch(
                f"version {link.version} has layout {found}, the model has {self._layout.digest}: "
                "another architecture or dtype was trained under this run id and policy"
            )

    def announced(self, version: CommittedVersion) -> bytes:
        """The manifest of a committed version, to travel with its announcement; empty above 64 KB."""
        body, _ = self.chain.link(version.version, version.manifest_sha256).manifest.to_bytes()
        return body if len(body) <= _ANNOUNCED else b""

    def changed(self, version: CommittedVersion) -> dict[str, float]:
        """The share of changed weights of a committed version, by role of the tensors."""
        return changed_by_role(self.chain.link(version.version, version.manifest_sha256).manifest, self._layout)

    def draft(self, version: int, lineage: int, parent: CommittedVersion | None, kind: Kind = None) -> Draft:
        """What every rank has to upload for a version (see ``DeltaPublisher.publish``). Raises ValueError."""
        before = parent.version if parent else -1
        if type(version) is not int or not before < version < _TOO_MANY_VERSIONS:
            raise ValueError(f"version {version!r} does not follow its parent's {before} as a number")
        if parent is None and kind == "delta":
            raise ValueError("a delta needs a parent")
        newest = self.chain.link(parent.version, parent.manifest_sha256).manifest.newest_full if parent else version
        due = kind == "full" or parent is None or (kind is None and version - newest >= self._full_every)
        attempt = f"{lineage}-{uuid.uuid4().hex[:16]}"
        return Draft(version, parent, parent is not None and kind != "full", due, version if due else newest, attempt)

    def manifest(self, draft: Draft, lineage: int, batch: int, reports: Sequence[ShareReport]) -> WeightManifest:
        """The manifest of what all ranks uploaded. reports: one of every rank."""
        ordered = sorted(reports, key=lambda report: report.rank)
        return WeightManifest(
            version=draft.version,
            lineage=lineage,
            batch=batch,
            parent=draft.parent.version if draft.parent else -1,
            parent_sha256=draft.parent.manifest_sha256 if draft.parent else "",
            root_digest=root_of(digest for report in ordered for digest in report.digests),
            layout_digest=self._layout.digest,
            newest_full=draft.newest_full,
            delta=_joined(report.delta for report in ordered),
            full=_joined(report.full for report in ordered),
            changed=tuple(sum(column) for column in zip(*(report.changed for report in ordered), strict=True)),
            elements=sum(tensor.size for tensor in self._layout.tensors),
            attempt=draft.attempt,
            published_ms=int(time.time() * 1000),
        )

    def commit(self, manifest: WeightManifest) -> CommittedVersion:
        """Create the manifest; done already is fine.

        Raises VersionTaken, the store's errors, and ValueError for a manifest that no reader would accept.
        """
        check_manifest(manifest)
        keys = self.chain.keys
        body, sha256 = manifest.to_bytes()
        if not self._layout_stored:
            with suppress(AlreadyExists):
                self._store.put(keys.layout(self._layout.digest), self._layout.to_bytes(), create_only=True)
            self._layout_stored = True
        if isinstance(self._store, FencedStore) and manifest.parent >= 0:
            parent = self.chain.link(manifest.parent, manifest.parent_sha256).manifest
            self._store.mend(keys.manifest(parent.version), parent.to_bytes()[0])
        try:
            self._store.put(keys.manifest(manifest.version), body, create_only=True)
        except AlreadyExists:
            if self.chain.link(manifest.version).manifest.attempt != manifest.attempt:
                self._refuse(manifest)
        self.chain.remember(Link(manifest, sha256))
        if manifest.full or manifest.version % _HINT_EVERY == 0:
            with suppress(StoreError):  # A hint: it only shortens the listing of a reader that starts.
                self._store.put(keys.latest, str(manifest.version).encode())
        return manifest.committed(keys, sha256)

    def _refuse(self, manifest: WeightManifest) -> NoReturn:
        head = self.chain.head(manifest.version)
        taken = self.chain.committed(manifest.version)
        raise VersionTaken(
            f"{self._store.url}: version {manifest.version} of {self.chain.keys.root} was committed by attempt "
            f"{taken.attempt} (lineage {taken.lineage}, batch {taken.batch}), not by this writer's {manifest.attempt}",
            head or taken,
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """A publish that is uploaded and not known to be committed; the same call repeated only repeats the commit."""

    same: tuple[object, ...]
    manifest: WeightManifest
    began: float

    def serves(self, same: tuple[object, ...]) -> bool:
        """Whether it may still be committed: objects that no manifest names are swept after an hour."""
        return self.same == same and time.monotonic() - self.began < _STALE_AFTER


def settled(share: VersionShare, commit: Callable[[], CommittedVersion]) -> CommittedVersion:
    """Commit what a share uploaded and make it the baseline, or forget it when another writer has the version.

    After any other error the share keeps it, so that the same call can be repeated.
    """
    try:
        committed = commit()
    except VersionTaken:
        share.give_up()
        raise
    share.promote(committed)
    return committed


class DeltaPublisher:
    """Publishes the versions of one policy from one process that has all weights.

    layout: the table of its weights. full_every: a full goes beside the delta when the newest full is this many
    versions old. context: code deltas by old exponent where that is smaller (for slow links: a third fewer bytes at
    less than half the speed). kernels: what compares and codes (None: the fastest on this CPU). Holds two images of the
    weights on the host. Calls come from one thread at a time.
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
        kernels: Kernels | None = None,
    ) -> None:
        self._store = store
        self._layout = layout
        self.commits = VersionCommits(store, run, policy, layout, full_every)
        self._chain = self.commits.chain
        self._share = VersionShare(store, self._chain.keys, layout, context=context, kernels=kernels)
        self._attempt: Attempt | None = None

    @property
    def baseline(self) -> CommittedVersion | None:
        """The committed version that the next delta is made against; None before the first."""
        return self._share.version

    def head(self) -> CommittedVersion | None:
        """The newest committed version in the store, None when there is none. Raises the store's errors."""
        return self.commits.head(self.baseline)

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
        self.commits.refuse_other_layout(image.link)
        self._share.seed(committed, image.data, image.digests)
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
        kind: Kind = None,
    ) -> CommittedVersion:
        """Upload and commit a version.

        weights: name -> raw bits (uint16 for bfloat16) of the tensor's shape. version: above the parent's. parent: the
        committed head; the baseline is loaded from the store if it is another version. kind: ``delta`` or ``full``
        alone; None is a delta where there is a parent, with a full beside it when one is due. When it raises a store
        error the same call may be repeated; a commit that had succeeded unseen is then found and returned. Raises
        VersionTaken when another writer has committed ``version``, LayoutMismatch, ValueError.
        """
        if parent is not None and version > parent.version and self.baseline != parent:
            self.load_baseline(parent)
        self._layout.fill(self._share.room(), weights)
        same = (version, lineage, batch, parent, kind)
        attempt = self._attempt
        if attempt is None or not attempt.serves(same) or not self._share.drafted():
            draft = self.commits.draft(version, lineage, parent, kind)
            began = time.monotonic()
            report = self._share.upload(draft)
            attempt = Attempt(same, self.commits.manifest(draft, lineage, batch, [report]), began)
            self._attempt = attempt
        manifest = attempt.manifest
        return settled(self._share, lambda: self.commits.commit(manifest))


def _joined(parts: Iterable[tuple[ShardRef, ...]]) -> tuple[ShardRef, ...]:
    return tuple(ref for part in parts for ref in part)
