"""Brings published weights to a worker: follows the chain of a policy and keeps verified weights on the host.

Goes in: a store, a run and a policy (and announcements as hints); comes out: snapshots of whole, verified versions. The
loaded version advances only after the root digest matched; a snapshot never changes once it is handed out, so an engine
may install it while the next version is being fetched.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from headrace.connectors.stores.chain import Chain, Hop, Link, MissingLink, NothingCommitted
from headrace.connectors.stores.image import Image, apply_hop, check_hop, load_image
from headrace.connectors.stores.store import NoSuchKey, ObjectStore
from headrace.schemas.delta_layout import DeltaCorrupt, Layout
from headrace.schemas.delta_manifest import CommittedVersion

__all__ = ("CheckedVersion", "Loaded", "Snapshot", "WeightReader", "verify_chain")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a fetch did: the version now loaded, whether it is another than before, and what that took.

    bytes_read: bytes of weights objects fetched. hops: objects' versions applied (1 full counts one).
    """

    version: CommittedVersion
    advanced: bool
    bytes_read: int
    hops: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights of one version, verified.

    version: what the store says of it. layout: the table. weights: name -> read-only array of raw bits, shaped (uint16
    for bfloat16, else the numpy dtype); they stay valid and unchanged as long as they are held.
    """

    version: CommittedVersion
    layout: Layout
    weights: Mapping[str, NDArray[Any]]


class WeightReader:
    """Follows one policy of a run. Every method may be called from any thread; fetches run one at a time.

    A fetch builds the new version in memory of its own beside the loaded one (twice the weights for that time) and
    swaps when everything is verified: a crash, an exception or a damaged object leaves the loaded version as it is.

    host_copy: keep the loaded version in memory, as the base of the next one. Without it a snapshot is handed over once
    and forgotten, and every fetch begins from the newest full.
    """

    def __init__(self, store: ObjectStore, run: str, policy: str, *, host_copy: bool = True) -> None:
        self._chain = Chain(store, run, policy)
        self._host_copy = host_copy
        self._fetching = threading.Lock()
        self._image: Image | None = None
        self._loaded: Link | None = None
        self._requests = 1

    @property
    def version(self) -> int:
        """The loaded version; -1 before the first fetch."""
        loaded = self._loaded
        return -1 if loaded is None else loaded.version

    def keep_warm(self) -> None:
        """Keep as many connections to the store open as the last fetch used; call it every few seconds between two."""
        if self._requests > 1:
            self._chain.keep_warm(self._requests)

    def head_version(self, hint: int | None = None) -> int:
        """The newest committed version in the store, -1 when there is none.

        hint: a version announced on the topic ``deltas``; it saves listing what came before, and may be wrong. Raises
        StoreUnavailable (ask again) and StoreRefused.
        """
        return self._chain.head_version(max(self.version, -1 if hint is None else hint))

    def committed(self, version: int) -> CommittedVersion:
        """What the store says of a version. Raises NoSuchKey, DeltaCorrupt and the store's errors."""
        return self._chain.committed(version)

    def fetch(self, version: int | None = None, manifest_sha256: str = "", manifest: bytes = b"") -> Loaded:
        """Load a version (None: the newest) and verify every byte of it; nothing to do when it is loaded.

        manifest_sha256: the announced one; another manifest is refused. manifest: the announced manifest itself, where
        it came along; it saves asking the store for it, and is left out when it is not the one that was announced.
        Raises NothingCommitted (retry later), StoreUnavailable (retry), NoSuchKey when the version is not committed,
        DeltaCorrupt or MissingLink when it cannot be rebuilt. Whatever is raised, the loaded version stays.
        """
        with self._fetching:
            before = self._image
            wanted = self.head_version() if version is None else version
            if wanted < 0:
                raise NothingCommitted(
                    f"{self._chain.store.url}: nothing is committed under {self._chain.keys.root} yet; "
                    "the trainer publishes version 0 when it starts"
                )
            if manifest and manifest_sha256:
                self._chain.accept(wanted, manifest_sha256, manifest)
            link = self._chain.link(wanted, manifest_sha256)
            if self._loaded == link:
                return Loaded(self._chain.committed(wanted), False, 0, 0)
            image = load_image(self._chain, wanted, before)
            self._image, self._loaded, self._requests = image, image.link, image.requests
            return Loaded(self._chain.committed(image.version), True, image.bytes_read, image.hops)

    def snapshot(self) -> Snapshot:
        """The loaded weights. Raises NothingCommitted before the first fetch, or when they were handed over."""
        image = self._image
        if image is None:
            raise NothingCommitted(f"no version of {self._chain.keys.root} is in memory: call fetch first")
        if not self._host_copy:
            self._image = None
        version = image.link.manifest.committed(self._chain.keys, image.link.sha256)
        return Snapshot(version, image.layout, image.layout.views(image.data))


@dataclass(frozen=True, slots=True)
class CheckedVersion:
    """The verdict on one committed version.

    version: its number. committed: what its manifest says, None when the manifest cannot be read. ways: what was
    rebuilt and matched the root digest (``full``, ``delta``, ``merged``); ``delta (read only)`` when the parent is gone
    and only the digests of its objects could be checked. problem: empty, or what is wrong.
    """

    version: int
    committed: CommittedVersion | None
    ways: tuple[str, ...]
    problem: str

    @property
    def root_digest(self) -> str:
        """The root digest by the manifest; empty when it cannot be read."""
        return self.committed.root_digest if self.committed else ""


def verify_chain(store: ObjectStore, run: str, policy: str) -> list[CheckedVersion]:
    """Rebuild every committed version of a policy in every way the store offers, and compare root digests.

    Versions in order, from the oldest that is kept, with those before it that were kept for themselves; a version
    without a problem can be loaded bit for bit. Raises the store's errors.
    """
    chain = Chain(store, run, policy)
    floor = chain.pruned_below()
    spared = chain.spared_below(floor)
    return list(_checked(chain, [one for one in chain.versions() if one >= floor or one in spared], floor))


def _checked(chain: Chain, versions: list[int], floor: int) -> Iterator[CheckedVersion]:
    """The versions in order; of those below ``floor`` the one way that was kept."""
    image: Image | None = None
    for version in versions:
        try:
            committed = chain.committed(version)
            link = chain.link(version)
        except (DeltaCorrupt, NoSuchKey) as error:
            image = None
            yield CheckedVersion(version, None, (), str(error))
            continue
        ways: list[str] = []
        problems: list[str] = []
        found: Image | None = None
        only = Hop.full(link) if link.manifest.full else Hop.delta(link)
        for hop in chain.ways_to(link, floor) if version >= floor else (only,):
            try:
                base = _parent(chain, hop, image)
            except (DeltaCorrupt, MissingLink, NoSuchKey) as error:
                # The parent is at fault, and is named where it stands; the objects of this hop can be damaged as well.
                problem = _damage(chain, hop)
                if problem or not link.manifest.full:
                    problems.append(problem or f"{hop}: its parent cannot be rebuilt: {error}")
                else:
                    ways.append(f"{hop.way} (read only)")
                continue
            try:
                found = apply_hop(chain, hop, base)
                ways.append(hop.way)
            except (DeltaCorrupt, MissingLink, NoSuchKey) as error:
                problems.append(f"{hop}: {error}")
        image = found
        yield CheckedVersion(version, committed, tuple(ways), "; ".join(problems))


def _damage(chain: Chain, hop: Hop) -> str:
    """What is wrong with the objects of a hop by themselves; empty when nothing is."""
    try:
        check_hop(chain, hop)
    except (DeltaCorrupt, NoSuchKey) as error:
        return f"{hop}: {error}"
    return ""


def _parent(chain: Chain, hop: Hop, near: Image | None) -> Image | None:
    """What a hop builds on: ``near`` where it is that; a version before may also belong to another branch."""
    if hop.parent < 0 or (near is not None and (near.version, near.link.sha256) == (hop.parent, hop.parent_sha256)):
        return near if hop.parent >= 0 else None
    chain.link(hop.parent, hop.parent_sha256)
    return load_image(chain, hop.parent)
