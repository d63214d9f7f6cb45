"""Frees the store of what no reader, trainer or checkpoint can need: old versions, lost attempts, unfinished uploads.

Goes in: a policy's chain, the versions that somebody still holds; comes out: fewer objects. Manifests of pruned
versions stay, so that nobody can commit their numbers again; a reader that meets a pruned object plans again.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.connectors.kafka import Connection
from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.store import NoSuchKey, ObjectInfo, ObjectStore
from headrace.schemas.delta_layout import DeltaCorrupt
from headrace.schemas.records import Demand

__all__ = ("GRACE_SECONDS", "ORPHAN_SECONDS", "Pruned", "live_versions", "prune")

GRACE_SECONDS = 3600.0
"""No object of a version that was published more recently is deleted: twice the longest download, at least."""
ORPHAN_SECONDS = 3600.0
"""Objects that no manifest names are deleted when they are older; publishers upload again what is half as old."""
_UNDER_WAY = 24
"""So many times as long for objects of a version above the newest: a slow upload may still be under way."""
_KEPT_FULLS = 2
_MAX_LAG = 512
_SILENT_MS = 60_000


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a pruning did or would do.

    floor: the oldest version that is kept. versions: those whose objects go. objects: how many go, orphans among them,
    which no manifest names. unfinished: multipart uploads and temporary files. nbytes: bytes of all objects that go.
    """

    floor: int
    versions: tuple[int, ...]
    objects: int
    orphans: int
    unfinished: int
    nbytes: int


def live_versions(connection: Connection, policy: int) -> list[int]:
    """Versions that living rollout workers hold, by their heartbeats on ``demand`` in the last minute.

    Raises BrokerUnreachable.
    """
    since = int(time.time() * 1000) - _SILENT_MS
    newest: dict[str, Demand] = {}
    for raw in connection.read_topic("demand", connection.offsets_since("demand", since)):
        record = raw.decoded_if_ours()
        if isinstance(record, Demand) and record.sent_ms > since:
            newest[record.worker] = record
    return [hosted.version for one in newest.values() for hosted in one.policies if hosted.policy == policy]


def prune(
    store: ObjectStore,
    run: str,
    policy: str,
    *,
    held: Iterable[int] = (),
    checkpoints: Iterable[int] = (),
    single: Iterable[int] = (),
    grace_seconds: float = GRACE_SECONDS,
    orphan_seconds: float = ORPHAN_SECONDS,
    max_lag: int = _MAX_LAG,
    dry: bool = False,
) -> Pruned:
    """Delete what lies below the floor: the newest two fulls and all after the older one stay.

    held: versions of living readers; those more than ``max_lag`` behind the head hold nothing. checkpoints: versions of
    kept checkpoints: what leads to the oldest stays. single: versions that are kept for themselves, however old, with
    no more than what rebuilds them. dry: only say what would go. Raises the store's errors; it may be
    stopped and repeated at any point.
    """
    chain = Chain(store, run, policy)
    now = time.time()
    versions = chain.versions(_pruned_below(chain) - 1)
    chain.links(versions)
    needed = [*checkpoints, *(v for v in held if versions and v >= versions[-1] - max_lag)]
    floor = _floor(chain, versions, needed, now - grace_seconds)
    if not dry and versions and floor > versions[0]:
        store.put(chain.keys.pruned, str(floor).encode())
    kept = _named(chain, [v for v in versions if v >= floor], floor) | _rebuilding(chain, single, floor)
    going: list[ObjectInfo] = []
    old: set[int] = set()
    orphans = 0
    for kind in ("delta", "full", "merged"):
        for info in store.list(f"{chain.keys.root}/{kind}/"):
            text = info.key.removeprefix(f"{chain.keys.root}/{kind}/")[:12].partition("/")[0]
            version = int(text) if text.isdecimal() else floor
            under_way = not versions or version > versions[-1]
            spare_seconds = orphan_seconds * _UNDER_WAY if under_way else orphan_seconds
            if info.key in kept or (version >= floor and info.modified > now - spare_seconds):
                continue
            going.append(info)
            if version >= floor:
                orphans += 1
            else:
                old.add(version)
    unfinished = 0
    if not dry:
        # Manifests of merged deltas first: nobody plans over what is about to go.
        for info in sorted(going, key=lambda one: not one.key.endswith(".json")):
            store.delete(info.key)
        unfinished = store.sweep_unfinished(f"{chain.keys.root}/", now - orphan_seconds)
    return Pruned(floor, tuple(sorted(old)), len(going), orphans, unfinished, sum(info.size for info in going))


def _pruned_below(chain: Chain) -> int:
    """The floor of an earlier pruning. A mark that names anything but a full is damaged, and is not believed."""
    below = chain.pruned_below()
    try:
        return below if below and chain.link(below).manifest.full else 0
    except (NoSuchKey, DeltaCorrupt):
        return 0


def _floor(chain: Chain, versions: Sequence[int], needed: Iterable[int], before: float) -> int:
    """The oldest version to keep: a full from which every needed version and the newest two fulls can be built.

    before: seconds; versions published later are needed too.
    """
    manifests = [chain.link(version).manifest for version in versions]
    fulls = [one.version for one in manifests if one.full]
    if len(fulls) < _KEPT_FULLS:
        return versions[0] if versions else 0
    young = [one.version for one in manifests if one.published_ms / 1000 > before]
    wanted = min([*needed, *young, fulls[-_KEPT_FULLS]])
    floor = max((version for version in fulls if version <= wanted), default=versions[0])
    # After a rollback a version may build on an older full than the newest before it.
    while (lowest := max(versions[0], min(one.newest_full for one in manifests if one.version >= floor))) < floor:
        floor = lowest
    return floor


def _rebuilding(chain: Chain, versions: Iterable[int], floor: int) -> set[str]:
    """Keys of the objects that rebuild versions below the floor: the full before each and the deltas that follow."""
    keys: set[str] = set()
    for number in versions:
        if number >= floor:
            continue
        manifest = chain.link(number).manifest
        while not manifest.full:
            keys |= {ref.key for ref in manifest.delta}
            manifest = chain.link(manifest.parent).manifest
        keys |= {ref.key for ref in manifest.full}
    return keys


def _named(chain: Chain, versions: Sequence[int], floor: int) -> set[str]:
    """Keys of all objects that kept versions and merged deltas between them name."""
    manifests = [chain.link(version).manifest for version in versions]
    keys = {ref.key for manifest in manifests for ref in (*manifest.delta, *manifest.full)}
    # The delta of the oldest kept version leads from what is gone.
    keys -= {ref.key for manifest in manifests if manifest.parent < floor and manifest.full for ref in manifest.delta}
    for merges in chain.merges(floor, versions[-1] if versions else 0).values():
        for one in merges:
            if one.first >= floor:
                keys |= {chain.keys.merged(one.version, one.first), *(ref.key for ref in one.refs)}
    return keys
