"""The chain of committed weight versions of a policy, as the object store holds it: head, manifests, plans.

Goes in: a store, a run and a policy; comes out: the newest version, verified manifests, and the cheapest way from what
a reader has (or from nothing) to a version. The store is the truth; hints only save requests.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from headrace.connectors.stores.store import NoSuchKey, ObjectStore
from headrace.schemas.delta_layout import DeltaCorrupt, DeltaError, Layout
from headrace.schemas.delta_manifest import CommittedVersion, DeltaKeys, ShardRef, WeightManifest

__all__ = ("Chain", "Hop", "Link", "MissingLink", "NothingCommitted")

_REQUEST_COST = 256 << 10
_KEPT_LINKS = 1024
_THREADS = 8


class NothingCommitted(DeltaError):
    """The policy has no committed version (yet); ask again later."""


class MissingLink(DeltaError):
    """A version cannot be rebuilt: objects on every way to it are missing or damaged; the message names them."""


@dataclass(frozen=True, slots=True)
class Link:
    """A verified manifest and its sha256."""

    manifest: WeightManifest
    sha256: str

    @property
    def version(self) -> int:
        """The manifest's version."""
        return self.manifest.version


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a plan: take a version's full, or its delta on top of its parent."""

    link: Link
    full: bool

    @property
    def refs(self) -> tuple[ShardRef, ...]:
        """The objects to read."""
        return self.link.manifest.full if self.full else self.link.manifest.delta

    @property
    def cost(self) -> int:
        """Bytes to read, with a request counted as 256 KB."""
        return sum(ref.nbytes + _REQUEST_COST for ref in self.refs)

    def __str__(self) -> str:
        return f"{'full' if self.full else 'delta'} of version {self.link.version}"


class Chain:
    """Reads one policy's chain; may be used from several threads. Its calls raise the store's errors."""

    def __init__(self, store: ObjectStore, run: str, policy: str) -> None:
        self.store = store
        self.keys = DeltaKeys(run, policy)
        self.pool = ThreadPoolExecutor(_THREADS, "weights")
        self._links: dict[int, Link] = {}
        self._layouts: dict[str, Layout] = {}

    def versions(self, after: int = -1) -> list[int]:
        """Committed versions above ``after``, ascending."""
        start = self.keys.manifest(after) if after >= 0 else ""
        found = (self.keys.version_of(info.key) for info in self.store.list(self.keys.manifests, start))
        return [version for version in found if version is not None]

    def head_version(self, known: int = -1) -> int:
        """The newest committed version, -1 for none.

        known: a version known to be committed; it saves listing everything before it.
        """
        if known < 0:
            known = self._hint()
        newer = self.versions(known)
        if newer:
            return newer[-1]
        if known >= 0:
            with suppress(NoSuchKey):
                self.store.head(self.keys.manifest(known))
                return known
            # The hint names what is not there: it is wrong or the version has been pruned.
            everything = self.versions()
            return everything[-1] if everything else -1
        return -1

    def head(self, known: int = -1) -> CommittedVersion | None:
        """The newest committed version with its manifest verified; None when nothing is committed."""
        version = self.head_version(known)
        return None if version < 0 else self.committed(version)

    def committed(self, version: int) -> CommittedVersion:
        """A committed version. Raises NoSuchKey, DeltaCorrupt."""
        link = self.link(version)
        return link.manifest.committed(self.keys, link.sha256)

    def link(self, version: int, sha256: str = "") -> Link:
        """The verified manifest of a version; with ``sha256`` it must be that one.

        Raises NoSuchKey, or DeltaCorrupt when it is damaged or another one than expected.
        """
        link = self._links.get(version)
        if link is None:
            link = self._read_link(version)
            self.remember(link)
        if sha256 and link.sha256 != sha256:
            raise DeltaCorrupt(
                f"{self.store.url}: {self.keys.manifest(version)} has sha256 {link.sha256}, expected {sha256}: "
                "its chain has forked or the store was written by hand"
            )
        return link

    def remember(self, link: Link) -> None:
        """Keep a manifest that is known to be committed, so that it need not be read."""
        self._links[link.version] = link
        while len(self._links) > _KEPT_LINKS:
            with suppress(StopIteration, KeyError, RuntimeError):  # Another thread is dropping it just now.
                self._links.pop(next(iter(self._links)))

    def layout(self, digest: str) -> Layout:
        """The layout table with this digest. Raises NoSuchKey, DeltaCorrupt."""
        layout = self._layouts.get(digest)
        if layout is None:
            key = self.keys.layout(digest)
            layout = Layout.from_bytes(self.store.get(key))
            if layout.digest != digest:
                raise DeltaCorrupt(f"{self.store.url}: {key} has digest {layout.digest}")
            self._layouts[digest] = layout
        return layout

    def plan(
        self, version: int, base: tuple[int, str] | None = None, without: Iterable[tuple[int, bool]] = ()
    ) -> list[Hop]:
        """The cheapest hops to a version, empty when ``base`` is it.

        base: version and manifest sha256 of what is loaded. without: (version, full) of hops that turned out unusable.
        A base that is not on the chain is ignored. Raises MissingLink when no way is left, NoSuchKey when the version
        itself is not committed.
        """
        unusable = set(without)
        link = self.link(version)
        if base is not None and base == (link.version, link.sha256):
            return []
        self._prefetch(max(link.manifest.newest_full, base[0] if base else -1), version)
        ways: list[list[Hop]] = []
        tail: list[Hop] = []
        trouble = ""
        while True:
            if link.manifest.full and (link.version, True) not in unusable:
                ways.append([Hop(link, True), *tail])
                if base is None or base[0] >= link.version:
                    break
            parent = link.manifest.parent
            if not link.manifest.delta or (link.version, False) in unusable:
                trouble = f"the delta of version {link.version} is missing or damaged"
                break
            tail = [Hop(link, False), *tail]
            if base is not None and base == (parent, link.manifest.parent_sha256):
                ways.append(tail)
                break
            try:
                link = self.link(parent, link.manifest.parent_sha256)
            except (NoSuchKey, DeltaCorrupt) as error:
                trouble = f"manifest {parent}: {error}"
                break
        if not ways:
            raise MissingLink(
                f"{self.store.url}: version {version} of {self.keys.root} cannot be rebuilt: {trouble}, and no usable "
                f"full lies between it and version {version}; publish a full version or restore the object"
            )
        return min(ways, key=lambda way: sum(hop.cost for hop in way))

    def _hint(self) -> int:
        try:
            text = self.store.get(self.keys.latest, 0, 20)
        except NoSuchKey:
            return -1
        return int(text) if text.isdigit() and len(text) <= 12 else -1

    def _read_link(self, version: int) -> Link:
        key = self.keys.manifest(version)
        try:
            manifest, sha256 = WeightManifest.from_bytes(self.store.get(key))
        except DeltaCorrupt:
            try:  # Bits flip on the way more often than in the store.
                manifest, sha256 = WeightManifest.from_bytes(self.store.get(key))
            except DeltaCorrupt as error:
                raise DeltaCorrupt(f"{self.store.url}: {key}: {error}") from error
        if manifest.version != version:
            raise DeltaCorrupt(f"{self.store.url}: {key} is the manifest of version {manifest.version}")
        return Link(manifest, sha256)

    def _prefetch(self, low: int, high: int) -> None:
        """Read manifests between two versions side by side, so that a long chain costs one round trip."""
        wanted = [version for version in range(max(0, low), high) if version not in self._links]
        if 1 < len(wanted) <= _KEPT_LINKS // 2:
            list(self.pool.map(self._prefetched, wanted))

    def _prefetched(self, version: int) -> None:
        with suppress(NoSuchKey, DeltaCorrupt):
            self.link(version)
