"""Compacts the chain of a policy: merged deltas over 4 and 16 versions, for readers that lag behind.

Goes in: committed versions; comes out: objects and manifests of merged deltas beside them. It commits no version and
changes none: a merged delta is one way more to a version, and a reader that takes it verifies the same root digest. It
may die at any step and be started again, also twice.
"""

import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress

from headrace.connectors.stores.chain import Chain, Link, MissingLink
from headrace.connectors.stores.image import Image, load_image
from headrace.connectors.stores.shards import ShardWriter
from headrace.connectors.stores.store import AlreadyExists, NoSuchKey, ObjectStore
from headrace.schemas.delta_layout import DeltaCorrupt
from headrace.schemas.delta_merged import MergedDelta

__all__ = ("SPANS", "Compactor")

SPANS = (4, 16)
"""Versions that a merged delta goes over; one ends at every multiple."""
_KEPT_FULLS = 2


class Compactor:
    """Merges the deltas of one policy. Holds up to ``len(spans) + 2`` images of the weights.

    context: code by old exponent where that is smaller (see ``DeltaPublisher``).
    """

    def __init__(
        self, store: ObjectStore, run: str, policy: str, spans: tuple[int, ...] = SPANS, *, context: bool = False
    ) -> None:
        self.policy = policy
        self._store = store
        self._chain = Chain(store, run, policy)
        self._spans = spans
        self._context = context
        self._images: OrderedDict[int, Image] = OrderedDict()
        self._through = -1

    def due(self) -> list[tuple[int, int]]:
        """Pairs (first, version) to merge, by version: from the second newest full on, without those that exist."""
        head = self._chain.head_version(self._through)
        if head < 0:
            return []
        links = list(self._back_from(head))
        fulls = [link.version for link in links if link.manifest.full]
        low = fulls[_KEPT_FULLS - 1] if len(fulls) >= _KEPT_FULLS else links[-1].version
        versions = [link.version for link in reversed(links) if link.version >= low]
        there = {(one.first, one.version) for ones in self._chain.merges(low, head).values() for one in ones}
        wanted: list[tuple[int, int]] = []
        for version in versions:
            for span in self._spans:
                first = max((v for v in versions if v <= version - span), default=-1)
                if version % span == 0 and first >= 0 and (first, version) not in there:
                    wanted.append((first, version))
        return wanted

    def merge(self, first: int, version: int) -> MergedDelta | None:
        """Upload and announce the change from ``first`` to ``version``; None when their layouts differ.

        Raises MissingLink, NoSuchKey, DeltaCorrupt and the store's errors.
        """
        old = self._image(first, None)
        new = self._image(version, old)
        if old.layout.digest != new.layout.digest:
            return None
        writer = ShardWriter(self._store, new.layout, context=self._context)
        segments = range(len(new.layout.segments))
        rows = [one.row for one in writer.code(segments, new.data, old.data, old.digests)]
        keys, attempt = self._chain.keys, uuid.uuid4().hex[:16]
        refs = writer.upload_delta(
            version, first, rows, lambda part: keys.merged_shard(version, first, attempt, 0, part)
        )
        merged = MergedDelta(
            first=first,
            first_sha256=old.link.sha256,
            version=version,
            version_sha256=new.link.sha256,
            refs=refs,
            published_ms=int(time.time() * 1000),
        )
        with suppress(AlreadyExists):  # Another compactor was faster; both are right.
            self._store.put(keys.merged(version, first), merged.to_bytes(), create_only=True)
        return merged

    def run(self) -> list[tuple[int, int]]:
        """Merge everything that is due; the pairs that were merged. A version that cannot be rebuilt is left out."""
        return [(first, version) for first, version in self.due() if self.try_merge(first, version)]

    def try_merge(self, first: int, version: int) -> bool:
        """Merge, unless one of the two cannot be rebuilt (pruned meanwhile, damaged) or the layouts differ."""
        with suppress(MissingLink, NoSuchKey, DeltaCorrupt):
            return self.merge(first, version) is not None
        return False

    def _back_from(self, head: int) -> Iterator[Link]:
        """The chain from its head back to its second newest full."""
        link = self._chain.link(head)
        fulls = 0
        while True:
            yield link
            fulls += bool(link.manifest.full)
            if link.manifest.parent < 0 or fulls >= _KEPT_FULLS:
                return
            try:
                link = self._chain.link(link.manifest.parent, link.manifest.parent_sha256)
            except (NoSuchKey, DeltaCorrupt):
                return

    def _image(self, version: int, base: Image | None) -> Image:
        near = max((v for v in self._images if v <= version), default=None)
        image = load_image(self._chain, version, base if near is None else self._images[near])
        self._images[version] = image
        self._images.move_to_end(version)
        while len(self._images) > len(self._spans) + 2:
            self._images.popitem(last=False)
        return image
