"""The chain of committed weight versions of a policy, as the object store holds it: head, manifests, plans.

Goes in: a store, a run and a policy; comes out: the newest version, verified manifests, and the cheapest way from what
a reader has (or from nothing) to a version. The store is the truth; hints only save requests.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from headrace.connectors.stores.store import NoSuchKey, ObjectStore, StoreError, exists
from headrace.schemas.delta_layout import DeltaCorrupt, DeltaError, Layout
from headrace.schemas.delta_manifest import CommittedVersion, DeltaKeys, ShardRef, WeightManifest
from headrace.schemas.delta_merged import MergedDelta

__all__ = ("Chain", "Hop", "Link", "MissingLink", "NothingCommitted")

_REQUEST_COST = 256 << 10
_KEPT_LINKS = 1024
_THREADS = 32
_MERGES_BEYOND = 3
_FARTHEST_PREFETCH = 64


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
    """One step of a plan: what leads to a version from ``parent`` (-1: from nothing). Its text names it."""

    link: Link
    parent: int
    parent_sha256: str
    refs: tuple[ShardRef, ...]

    @classmethod
    def full(cls, link: Link) -> "Hop":
        """By the version's full."""
        return cls(link, -1, "", link.manifest.full)

    @classmethod
    def delta(cls, link: Link) -> "Hop":
        """By the version's delta on its parent."""
        return cls(link, link.manifest.parent, link.manifest.parent_sha256, link.manifest.delta)

    @classmethod
    def merged(cls, link: Link, merged: MergedDelta) -> "Hop":
        """By a merged delta."""
        return cls(link, merged.first, merged.first_sha256, merged.refs)

    @property
    def way(self) -> str:
        """``full``, ``delta`` or ``merged``."""
        if self.parent < 0:
            return "full"
        return "delta" if self.parent == self.link.manifest.parent else "merged"

    @property
    def cost(self) -> int:
        """Bytes to read, with a request counted as 256 KB."""
        return sum(ref.nbytes + _REQUEST_COST for ref in self.refs)

    def __str__(self) -> str:
        merged = f"merged delta from version {self.parent} to" if self.way == "merged" else f"{self.way} of version"
        return f"{merged} {self.link.version}"


class Chain:
    """Reads one policy's chain; may be used from several threads. Its calls raise the store's errors."""

    def __init__(self, store: ObjectStore, run: str, policy: str) -> None:
        self.store = store
        self.keys = DeltaKeys(run, policy)
        self.pool = ThreadPoolExecutor(_THREADS, "weights")
        self._links: dict[int, Link] = {}
        self._layouts: dict[str, Layout] = {}
        self._merges: dict[tuple[int, int], MergedDelta] = {}

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
        # One that a replaced writer had overwritten may have been put back since it was read.
        if link is None or (sha256 and link.sha256 != sha256):
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

    def accept(self, version: int, sha256: str, data: bytes) -> None:
        """Keep an announced manifest unless one is known; nothing happens when it is not what was announced."""
        with suppress(DeltaCorrupt):
            manifest, found = WeightManifest.from_bytes(data)
            if (manifest.version, found) == (version, sha256) and version not in self._links:
                self.remember(Link(manifest, found))

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

    def plan(self, version: int, base: tuple[int, str] | None = None, without: Iterable[str] = ()) -> list[Hop]:
        """The cheapest hops to a version, empty when ``base`` is it.

        base: version and manifest sha256 of what is loaded. without: texts of hops that turned out unusable. A base
        that is not on the chain is ignored. Raises MissingLink when no way is left, NoSuchKey when the version itself
        is not committed.
        """
        target = self.link(version)
        if base == (version, target.sha256):
            return []
        loaded = base[0] if base and base[0] < version else -1
        low = loaded if loaded >= 0 else target.manifest.newest_full
        self._prefetch(low, version)
        merges = self.merges(low, version) if version - low > _MERGES_BEYOND else {}
        unusable = set(without)
        trouble = ""
        # Backwards from the target, cheapest first: the first start that is reached has the cheapest way.
        ways: list[tuple[int, int, int, str, tuple[Hop, ...]]] = [(0, 0, version, target.sha256, ())]
        done: set[tuple[int, str]] = set()
        tie = count(1)
        while ways:
            cost, _, number, sha256, tail = heappop(ways)
            if number < 0 or (number, sha256) == base:
                return list(tail)
            if (number, sha256) in done:
                continue
            done.add((number, sha256))
            try:
                link = self.link(number, sha256)
            except (NoSuchKey, DeltaCorrupt) as error:
                trouble = f"manifest {number}: {error}"
                continue
            for hop in self._hops(link, merges.get(number, ()), loaded, unusable):
                if str(hop) in unusable:
                    trouble = f"the {hop} is missing or damaged"
                else:
                    heappush(ways, (cost + hop.cost, next(tie), hop.parent, hop.parent_sha256, (hop, *tail)))
        raise MissingLink(
            f"{self.store.url}: version {version} of {self.keys.root} cannot be rebuilt: {trouble}, and no usable "
            f"full lies between it and version {version}; publish a full version or restore the object"
        )

    def merges(self, low: int, high: int) -> dict[int, list[MergedDelta]]:
        """Merged deltas between two versions, by the version that they lead to; unreadable ones are left out."""
        start = self.keys.merged(low, 0).removesuffix(".json") if low > 0 else ""
        wanted: list[tuple[int, int]] = []
        for info in self.store.list(self.keys.merges, start):
            ends = self.keys.merge_of(info.key)
            if ends is not None and ends[0] > high:
                break
            if ends is not None:
                wanted.append(ends)
        found: dict[int, list[MergedDelta]] = {}
        for merged in self.pool.map(self._merged, wanted) if len(wanted) > 1 else map(self._merged, wanted):
            link = self._readable(merged.version) if merged is not None else None
            if merged is not None and link is not None and merged.version_sha256 == link.sha256:
                found.setdefault(merged.version, []).append(merged)
        return found

    def keep_warm(self, connections: int) -> None:
        """Ask for something tiny on so many connections at once, so that the next download finds them open.

        Stores close idle connections after some seconds, and a new one costs round trips. Errors are left to the next
        real call.
        """

        def ask(_: int) -> None:
            with suppress(StoreError):
                exists(self.store, self.keys.latest)

        list(self.pool.map(ask, range(min(connections, _THREADS))))

    def pruned_below(self) -> int:
        """The oldest version whose objects are kept; 0 when nothing was pruned."""
        try:
            text = self.store.get(self.keys.pruned, 0, 20)
        except NoSuchKey:
            return 0
        return int(text) if text.isdigit() and len(text) <= 12 else 0

    def spared_below(self, floor: int) -> set[int]:
        """Versions below the oldest kept one that have objects still: one that was kept for itself, and its way."""
        found: set[int] = set()
        for kind in ("delta", "full") if floor > 0 else ():
            prefix = f"{self.keys.root}/{kind}/"
            for info in self.store.list(prefix):
                text = info.key.removeprefix(prefix).partition("/")[0]
                if text.isdecimal() and int(text) < floor:
                    found.add(int(text))
        return found

    def ways_to(self, link: Link, low: int = 0) -> list[Hop]:
        """Every way to a version from one not below ``low``: delta, full, merged deltas."""
        merges = self.merges(link.version, link.version).get(link.version, ())
        known = [Hop.delta(link)] if link.manifest.delta and link.manifest.parent >= low else []
        known += [Hop.full(link)] if link.manifest.full else []
        return known + [Hop.merged(link, one) for one in merges if one.first >= low]

    def _hops(self, link: Link, merges: Iterable[MergedDelta], loaded: int, unusable: set[str]) -> Iterator[Hop]:
        """The ways to a version that are worth a look; below its full only where what is loaded lies there."""
        if link.manifest.full:
            full = Hop.full(link)
            yield full
            if not 0 <= loaded < link.version and str(full) not in unusable:
                return
        if link.manifest.delta:
            yield Hop.delta(link)
        for merged in merges:
            yield Hop.merged(link, merged)

    def _merged(self, ends: tuple[int, int]) -> MergedDelta | None:
        merged = self._merges.get(ends)
        if merged is None:
            with suppress(NoSuchKey, DeltaCorrupt):
                merged = MergedDelta.from_bytes(self.store.get(self.keys.merged(*ends)))
                if (merged.version, merged.first) == ends:
                    self._merges[ends] = merged
                    return merged
            return None
        return merged

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

    def links(self, versions: Iterable[int]) -> list[Link]:
        """The verified manifests of several versions, read side by side; unreadable ones are left out."""
        wanted = list(versions)
        found = self.pool.map(self._readable, wanted) if len(wanted) > 1 else map(self._readable, wanted)
        return [link for link in found if link is not None]

    def _prefetch(self, low: int, high: int) -> None:
        """Read manifests between two versions side by side, so that a long chain costs one round trip."""
        self.links(v for v in range(max(0, low, high - _FARTHEST_PREFETCH), high) if v not in self._links)

    def _readable(self, version: int) -> Link | None:
        with suppress(NoSuchKey, DeltaCorrupt):
            return self.link(version)
        return None
