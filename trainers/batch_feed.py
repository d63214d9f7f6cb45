"""What all ranks read together: the order of batches from rank 0, items of each rank's lanes, positions of all lanes.

Rank 0 alone reads manifests and tells the others; arrays of large items are fetched from the object store while they
are read ahead.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from headrace.connectors.blobs import get_sequences
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.store import ObjectStore
from headrace.schemas.records import End, Item, Manifest
from headrace.trainers.checkpoint import Positions
from headrace.trainers.lanes import BatchReader, Stopped
from headrace.trainers.patience import patiently
from headrace.trainers.ranks import Ranks

__all__ = ("BatchFeed",)


class BatchFeed:
    """A reader on every rank. ``order``, ``offsets`` and ``positions`` are collective."""

    def __init__(self, reader: BatchReader, ranks: Ranks, store: ObjectStore, stop: StopSignal) -> None:
        self._reader, self._ranks, self._store, self._stop = reader, ranks, store, stop
        reader.fetch_with(self._whole)

    def order(self, batch: int) -> Manifest | End:
        """The Manifest of a batch or the End before it, from rank 0 on every rank. Raises Stopped on all of them."""
        found: Manifest | End | Stopped | None = None
        if self._ranks.leads:
            try:
                found = self._reader.order(batch)
            except Stopped as stopped:
                found = stopped
        order = cast(Manifest | End | Stopped, self._ranks.broadcast(found))
        if isinstance(order, Stopped):
            raise order
        return order

    def items(self, manifest: Manifest) -> list[Item]:
        """This rank's items of a batch, whole. Raises BrokenBatch, Stopped."""
        return self._reader.take(manifest)

    def _whole(self, item: Item) -> Item:
        blob = item.blob
        if blob is None:
            return item
        whole = patiently(lambda: get_sequences(self._store, blob), self._stop)
        return replace(item, sequences=[s for s in whole if s.policy == item.policy])

    def offsets(self) -> dict[int, int]:
        """Offsets after what was given out, of all lanes, from every rank."""
        parts: Sequence[dict[int, int]] = self._ranks.gather(dict(self._reader.lane_offsets))
        return {lane: at for part in parts for lane, at in part.items()}

    def positions(self) -> Positions:
        """Where a checkpoint taken now reads on; that of the manifests is rank 0's."""
        return Positions(manifests=self._reader.manifest_offset, lanes=self.offsets())
