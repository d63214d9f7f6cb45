"""From weights to a version that everybody knows: commit to the store, then announce it (protocol 8).

The manifest in the object store is the commit; the Step and the head pointer follow in one Kafka transaction. Nothing
is ever published twice: who loses a race first proves by a Kafka commit that it is still the trainer.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.fenced import FencedStore
from headrace.connectors.stores.image import load_image
from headrace.connectors.stores.store import ObjectStore
from headrace.schemas.delta_layout import Layout
from headrace.schemas.delta_manifest import CommittedVersion
from headrace.schemas.delta_steps import Kernels
from headrace.schemas.records import Head, Record
from headrace.trainers.backends.backend import Outgoing, TensorShard, Weights
from headrace.trainers.lineage import Point
from headrace.trainers.patience import patiently
from headrace.trainers.ranks import Ranks
from headrace.trainers.sharded_publisher import ShardedPublisher
from headrace.trainers.step_log import StepLog
from headrace.trainers.step_to_delta import DeltaPublisher, Kind, VersionTaken

__all__ = ("Versions", "copied", "head_record")


def head_record(committed: CommittedVersion, policy: int, manifest: bytes = b"") -> Head:
    """The pointer to a committed version, for ``deltas``; manifest: its file, when it is to travel with it."""
    return Head(
        policy=policy,
        version=committed.version,
        batch=committed.batch,
        lineage=committed.lineage,
        kind=committed.kind,
        manifest_key=committed.manifest_key,
        manifest_sha256=committed.manifest_sha256,
        root_digest=committed.root_digest,
        layout_digest=committed.layout_digest,
        size=committed.size,
        published_ms=committed.published_ms,
        manifest=manifest,
    )


class Versions:
    """Publishes the versions of one policy. ``head`` is the newest committed version, None before version 0.

    Without ``ranks`` only rank 0 has one, and gives it whole weights. With them every rank has one (``log`` on rank 0
    alone), gives it its shards, and calls ``publish`` and ``share_head`` together with the others. fenced: the store
    ignores conditions, so every commit in it is preceded by one in Kafka. kind: what every version consists of (see
    ``DeltaPublisher.publish``); adapters are ``full``, small and without a history.
    """

    def __init__(
        self,
        store: ObjectStore,
        log: StepLog | None,
        *,
        run: str,
        name: str,
        policy: int,
        shapes: Mapping[str, tuple[int, ...]],
        full_every: int,
        context: bool = False,
        stop: StopSignal,
        ranks: Ranks | None = None,
        kernels: Kernels | None = None,
        fenced: bool = False,
        kind: Kind = None,
    ) -> None:
        store = FencedStore(store, self._refuse_successor) if fenced else store
        layout = _layout_of(shapes)
        self._publisher: DeltaPublisher | ShardedPublisher
        if ranks is None:
            self._publisher = DeltaPublisher(store, run, name, layout, full_every, context=context, kernels=kernels)
        else:
            self._publisher = ShardedPublisher(
                store, run, name, layout, ranks, full_every, context=context, kernels=kernels
            )
        self._commits, self._ranks = self._publisher.commits, ranks
        self._log, self._policy, self._stop = log, policy, stop
        self._offsets: Mapping[int, int] = {}
        self._kind = kind
        self.head: CommittedVersion | None = None

    def read_head(self) -> Point | None:
        """Rank 0: read the head from the store; call it after predecessors were fenced."""
        self.head = patiently(self._publisher.head, self._stop)
        head = self.head
        return None if head is None else Point(lineage=head.lineage, batch=head.batch, version=head.version)

    def share_head(self) -> None:
        """Take rank 0's head on every rank."""
        if self._ranks is not None:
            self.head = self._ranks.broadcast(self.head)

    def publish(self, weights: Outgoing, *, lineage: int, batch: int, offsets: Mapping[int, int]) -> CommittedVersion:
        """Commit weights as the version after the head; waits while the store is away.

        A version taken by somebody else is adopted when it is of the same lineage and batch, else the next number is
        taken, both only after a Kafka commit has shown that this trainer is not fenced.
        """
        publish: Callable[..., CommittedVersion] = self._publisher.publish
        self._offsets = offsets
        while True:
            parent = self.head
            version = parent.version + 1 if parent else 0
            same = {"version": version, "lineage": lineage, "batch": batch, "parent": parent, "kind": self._kind}
            call = partial(publish, weights, **same)
            try:
                self.head = patiently(call, self._stop, self._ranks)
                return self.head
            except VersionTaken:
                if self._log is not None:
                    # In this order: a head that a successor published before the commit belongs to one who fenced us.
                    self.read_head()
                    self._log.commit([], offsets)
                self.share_head()
                head = self.head
                if head is not None and (head.lineage, head.batch) == (lineage, batch):
                    return head

    def _refuse_successor(self) -> None:
        """Show by a Kafka commit that this is still the trainer. Raises Superseded."""
        if self._log is not None:
            self._log.commit([], self._offsets)

    def weights(self) -> Weights:
        """The weights of the head as the store has them, in the memory of this process."""
        head = self.head
        assert head is not None, "nothing is published"
        image = patiently(lambda: load_image(self._commits.chain, head.version), self._stop)
        return image.layout.views(image.data)

    def changed(self) -> dict[str, float]:
        """Metrics of the head: ``changed/ROLE``, the share of changed weights of the tensors of a role."""
        head = self.head
        if head is None:
            return {}
        shares = patiently(lambda: self._commits.changed(head), self._stop)
        return {f"changed/{role}": share for role, share in shares.items()}

    def announce(self, records: list[Record], offsets: Mapping[int, int]) -> None:
        """Write records and the pointer to the head in one transaction."""
        head = self.head
        pointer: list[Record] = []
        if head is not None:
            manifest = patiently(lambda: self._commits.announced(head), self._stop)
            pointer.append(head_record(head, self._policy, manifest))
        assert self._log is not None, "only rank 0 writes"
        self._log.commit([*records, *pointer], offsets)


def copied(weights: Outgoing) -> Outgoing:
    """Weights or shards in memory of their own, which the next step leaves alone."""
    return {
        name: TensorShard(one.start, one.bits.copy()) if isinstance(one, TensorShard) else one.copy()
        for name, one in weights.items()
    }  # type: ignore[return-value]


def _layout_of(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """The layout of bfloat16 tensors; nothing is allocated."""
    arrays = {name: np.broadcast_to(np.uint16(0), shape) for name, shape in shapes.items()}
    return Layout.of(arrays, dict.fromkeys(shapes, "bfloat16"))
