"""Rank 0's way from weights to a version that everybody knows: commit to the store, then announce it (protocol 8).

The manifest in the object store is the commit; the Step and the head pointer follow in one Kafka transaction. Nothing
is ever published twice: who loses a race first proves by a Kafka commit that it is still the trainer.
"""

from collections.abc import Mapping

from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.store import ObjectStore
from headrace.schemas.delta_layout import Layout
from headrace.schemas.delta_manifest import CommittedVersion
from headrace.schemas.records import Head, Record
from headrace.trainers.backends.backend import Weights
from headrace.trainers.lineage import Point
from headrace.trainers.patience import patiently
from headrace.trainers.step_log import StepLog
from headrace.trainers.step_to_delta import DeltaPublisher, VersionTaken

__all__ = ("Versions", "head_record")


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
    """Publishes the versions of one policy. ``head`` is the newest committed version, None before version 0."""

    def __init__(
        self,
        store: ObjectStore,
        log: StepLog,
        *,
        run: str,
        name: str,
        policy: int,
        weights: Weights,
        full_every: int,
        context: bool = False,
        stop: StopSignal,
    ) -> None:
        layout = Layout.of(weights, dict.fromkeys(weights, "bfloat16"))
        self._publisher = DeltaPublisher(store, run, name, layout, full_every, context=context)
        self._log, self._policy, self._stop = log, policy, stop
        self.head: CommittedVersion | None = None

    def read_head(self) -> Point | None:
        """Read the head from the store; call it after predecessors were fenced."""
        self.head = patiently(self._publisher.head, self._stop)
        head = self.head
        return None if head is None else Point(lineage=head.lineage, batch=head.batch, version=head.version)

    def publish(self, weights: Weights, *, lineage: int, batch: int, offsets: Mapping[int, int]) -> CommittedVersion:
        """Commit weights as the version after the head; waits while the store is away.

        A version taken by somebody else is adopted when it is of the same lineage and batch, else the next number is
        taken, both only after a Kafka commit has shown that this trainer is not fenced.
        """
        while True:
            parent = self.head
            version = parent.version + 1 if parent else 0
            try:
                self.head = patiently(
                    lambda parent=parent, version=version: self._publisher.publish(  # type: ignore[misc]
                        weights, version=version, lineage=lineage, batch=batch, parent=parent
                    ),
                    self._stop,
                )
                return self.head
            except VersionTaken:
                self._log.commit([], offsets)
                found = self.read_head()
                if self.head is not None and found is not None and (found.lineage, found.batch) == (lineage, batch):
                    return self.head

    def changed(self) -> dict[str, float]:
        """Metrics of the head: ``changed/ROLE``, the share of changed weights of the tensors of a role."""
        head = self.head
        if head is None:
            return {}
        shares = patiently(lambda: self._publisher.changed(head), self._stop)
        return {f"changed/{role}": share for role, share in shares.items()}

    def announce(self, records: list[Record], offsets: Mapping[int, int]) -> None:
        """Write records and the pointer to the head in one transaction."""
        head = self.head
        pointer: list[Record] = []
        if head is not None:
            manifest = patiently(lambda: self._publisher.announced(head), self._stop)
            pointer.append(head_record(head, self._policy, manifest))
        self._log.commit([*records, *pointer], offsets)
