"""Publishing by all ranks of a trainer: each diffs and uploads its own run of the image, rank 0 commits.

Goes in: on every rank the shards of the parameters that it holds anyway (ZeRO-3: a contiguous run of each tensor);
comes out: one committed version. Nobody gathers the model: a rank holds copies of its share alone. Calls are collective
and in one order, and an error of any rank is raised on all.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from headrace.connectors.stores.image import load_share
from headrace.connectors.stores.store import ObjectStore, StoreError, StoreUnavailable
from headrace.schemas.delta_layout import DeltaError, Layout
from headrace.schemas.delta_manifest import CommittedVersion
from headrace.schemas.delta_steps import Kernels
from headrace.trainers.backends.backend import Shards
from headrace.trainers.ranks import Ranks
from headrace.trainers.shard_exchange import Exchange, exchange, plan_exchange
from headrace.trainers.step_to_delta import Attempt, Kind, VersionCommits, settled
from headrace.trainers.version_share import VersionShare

__all__ = ("ShardedPublisher",)

T = TypeVar("T")


class ShardedPublisher:
    """``DeltaPublisher`` for a trainer of several ranks; every rank has one and makes the same calls.

    Only rank 0 talks about versions with the store; the others read and write objects of their own share.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        policy: str,
        layout: Layout,
        ranks: Ranks,
        full_every: int = 20,
        *,
        context: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        self._layout, self._ranks = layout, ranks
        self.commits = VersionCommits(store, run, policy, layout, full_every)
        keys = self.commits.chain.keys
        self._share = VersionShare(
            store, keys, layout, rank=ranks.rank, ranks=ranks.size, context=context, kernels=kernels
        )
        self._attempt: Attempt | None = None
        self._held: list[dict[str, tuple[int, int]]] = []
        self._plan = Exchange(0, {}, {})

    @property
    def baseline(self) -> CommittedVersion | None:
        """The committed version that the next delta is made against."""
        return self._share.version

    def head(self) -> CommittedVersion | None:
        """The newest committed version in the store, None when there is none; not collective."""
        return self.commits.head(self.baseline)

    def publish(
        self,
        shards: Shards,
        *,
        version: int,
        lineage: int,
        batch: int,
        parent: CommittedVersion | None,
        kind: Kind = None,
    ) -> CommittedVersion:
        """Upload and commit a version from what each rank holds (see ``DeltaPublisher.publish``).

        After a store error all ranks may repeat the call: what is uploaded already is only committed. Raises
        VersionTaken, LayoutMismatch, ValueError and the store's errors, the same on every rank.
        """
        # All ranks ask, and load together: after a store error some have the baseline already and some do not.
        if parent is not None and version > parent.version and any(self._ranks.gather(self._share.version != parent)):
            self._everywhere(lambda: self._load(parent))
        held = self._ranks.gather({name: (one.start, one.start + one.bits.size) for name, one in shards.items()})
        if self._held != held:
            self._held, self._plan = held, plan_exchange(self._layout, held, self._ranks)
        exchange(self._plan, shards, self._ranks, self._share.room())
        same = (version, lineage, batch, parent, kind)
        attempt = self._attempt
        if not all(self._ranks.gather(attempt is not None and attempt.serves(same) and self._share.drafted())):
            self._share.give_up()
            attempt = self._attempt = None
        if attempt is None:
            draft = self._together(lambda: self.commits.draft(version, lineage, parent, kind))
            began = time.monotonic()
            reports = self._everywhere(lambda: self._share.upload(draft))
            attempt = self._attempt = Attempt(same, self.commits.manifest(draft, lineage, batch, reports), began)
        manifest = attempt.manifest
        return settled(self._share, lambda: self._together(lambda: self.commits.commit(manifest)))

    def _load(self, parent: CommittedVersion) -> None:
        """Take this rank's share of a committed version as baseline. Raises as ``DeltaPublisher.load_baseline``."""
        if self._share.version == parent:
            return
        chain = self.commits.chain
        self.commits.refuse_other_layout(chain.link(parent.version, parent.manifest_sha256))
        data, digests = load_share(chain, parent.version, self._share.segments)
        self._share.seed_share(parent, data, digests)
        self._attempt = None

    def _everywhere(self, call: Callable[[], T]) -> list[T]:
        """Run a call on every rank: all results, by rank, or the gravest error, on all of them."""
        mine: tuple[T | None, Exception | None]
        try:
            mine = (call(), None)
        except (StoreError, DeltaError) as error:
            mine = (None, error)
        found = self._ranks.gather(mine)
        errors = [error for _, error in found if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, StoreUnavailable)), errors[0])
        return [result for result, _ in found]  # type: ignore[misc]

    def _together(self, call: Callable[[], T]) -> T:
        """Run a call on rank 0; its result or its error on every rank."""
        answer: tuple[T | None, Exception | None] = (None, None)
        if self._ranks.leads:
            try:
                answer = (call(), None)
            except (StoreError, DeltaError, ValueError) as error:
                answer = (None, error)
        result, failed = self._ranks.broadcast(answer)
        if failed is not None:
            raise failed
        return result  # type: ignore[return-value]
