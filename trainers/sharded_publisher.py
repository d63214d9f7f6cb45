"""Publishing by all ranks of a trainer: each diffs and uploads its own run of the image, rank 0 commits.

Goes in: on every rank the shards of the parameters that it holds anyway (ZeRO-3: a contiguous run of each tensor);
comes out: one committed version. A byte crosses between ranks only where its owner in the image is another rank, so
nobody gathers the model, and each rank holds two copies of its share alone. Calls are collective and in one order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from headrace.connectors.stores.image import load_image
from headrace.connectors.stores.store import ObjectStore, StoreError
from headrace.schemas.delta_layout import DeltaError, Layout, Tensor
from headrace.schemas.delta_manifest import CommittedVersion
from headrace.trainers.ranks import Ranks
from headrace.trainers.step_to_delta import Kind, VersionCommits
from headrace.trainers.version_share import Draft, ShareReport, VersionShare, share_of

__all__ = ("ShardedPublisher", "TensorShard", "exchange", "zero3_shards")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Elements ``start`` and following of a tensor, flat, as raw bits (unsigned integers of its width, [count])."""

    start: int
    bits: NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of the image that one rank holds and another owns."""

    source: int
    target: int
    begin: int
    end: int
    tensor: Tensor


def zero3_shards(named: Mapping[str, torch.nn.Parameter], rank: int, ranks: int) -> dict[str, TensorShard]:
    """What this rank holds of parameters under DeepSpeed ZeRO-3, rounded to bfloat16; nothing is gathered.

    DeepSpeed cuts each flat tensor into ``ranks`` runs of equal length, the last ones padded.
    """
    shards: dict[str, TensorShard] = {}
    for name, parameter in named.items():
        mine: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        start = rank * mine.numel()
        count = max(0, min(mine.numel(), int(parameter.ds_numel) - start))  # type: ignore[attr-defined]
        bits = mine.detach()[:count].to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
        shards[name] = TensorShard(start, bits)
    return shards


def exchange(
    layout: Layout,
    shards: Mapping[str, TensorShard],
    held: Sequence[Mapping[str, tuple[int, int]]],
    ranks: Ranks,
    room: NDArray[np.uint8],
) -> None:
    """Fill ``room``, this rank's part of the image, from what all ranks hold.

    held: for every rank, name -> elements (start, stop) that it holds. Raises DeltaError when an element is nobody's.
    """
    runs = list(_runs(layout, held, ranks.size))
    own = [share_of(layout, rank, ranks.size) for rank in range(ranks.size)]
    begin = layout.segments[own[ranks.rank].start].offset if own[ranks.rank] else 0
    covered = sum(run.end - run.begin for run in runs if run.target == ranks.rank)
    wanted = sum(_overlap(tensor, begin, begin + room.size) for tensor in layout.tensors)
    if covered != wanted:
        raise DeltaError(f"rank {ranks.rank}: the ranks hold {covered} of {wanted} bytes of its share of the weights")

    def piece(run: _Run) -> NDArray[np.uint8]:
        shard = shards[run.tensor.name]
        octets = np.ascontiguousarray(shard.bits).view(np.uint8)
        at = run.begin - run.tensor.offset - shard.start * run.tensor.width
        return octets[at : at + run.end - run.begin]

    pending: list[tuple[list[_Run], torch.Tensor, Any]] = []
    for other in range(ranks.size):
        out = [run for run in runs if (run.source, run.target) == (ranks.rank, other)]
        if other == ranks.rank:
            for run in out:
                room[run.begin - begin : run.end - begin] = piece(run)
            continue
        come = [run for run in runs if (run.source, run.target) == (other, ranks.rank)]
        if out:
            message = torch.from_numpy(np.concatenate([piece(run) for run in out])).to(ranks.device)
            pending.append(([], message, dist.isend(message, other)))
        if come:
            message = torch.empty(sum(run.end - run.begin for run in come), dtype=torch.uint8, device=ranks.device)
            pending.append((come, message, dist.irecv(message, other)))
    for come, message, work in pending:
        work.wait()
        octets, at = message.cpu().numpy(), 0
        for run in come:
            room[run.begin - begin : run.end - begin] = octets[at : at + run.end - run.begin]
            at += run.end - run.begin


class ShardedPublisher:
    """``DeltaPublisher`` for a trainer of several ranks; every rank has one and makes the same calls.

    Only rank 0 talks about versions with the store; the others write objects. An error of any rank is raised on all.
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
    ) -> None:
        self._layout, self._ranks = layout, ranks
        self._commits = VersionCommits(store, run, policy, layout, full_every)
        self._share = VersionShare(
            store, self._commits.chain.keys, layout, rank=ranks.rank, ranks=ranks.size, context=context
        )

    @property
    def baseline(self) -> CommittedVersion | None:
        """The committed version that the next delta is made against."""
        return self._share.version

    def publish(
        self,
        shards: Mapping[str, TensorShard],
        *,
        version: int,
        lineage: int,
        batch: int,
        parent: CommittedVersion | None,
        kind: Kind = None,
    ) -> CommittedVersion:
        """Upload and commit a version from what each rank holds (see ``DeltaPublisher.publish``).

        After a store error the call may be repeated by all ranks; what was uploaded then has no manifest and is swept.
        Raises VersionTaken, ValueError and the store's errors, the same on every rank.
        """
        if parent is not None and self._share.version != parent:
            image = load_image(self._commits.chain, parent.version)
            self._share.seed(parent, image.data, image.digests)
        held = self._ranks.gather({name: (one.start, one.start + one.bits.size) for name, one in shards.items()})
        exchange(self._layout, shards, held, self._ranks, self._share.room())
        draft = self._together(lambda: self._commits.draft(version, lineage, parent, kind))
        reports = self._gathered(draft)
        try:
            manifest = self._commits.manifest(draft, lineage, batch, reports)
            committed = self._together(lambda: self._commits.commit(manifest))
        except (StoreError, DeltaError):
            self._share.give_up()
            raise
        self._share.promote(committed)
        return committed

    def _gathered(self, draft: Draft) -> list[ShareReport]:
        """Upload on every rank; all reports. An upload that failed anywhere fails everywhere."""
        mine: ShareReport | StoreError
        try:
            mine = self._share.upload(draft)
        except StoreError as error:
            mine = error
        found = self._ranks.gather(mine)
        reports = [one for one in found if isinstance(one, ShareReport)]
        if len(reports) < len(found):
            self._share.give_up()
            raise next(one for one in found if isinstance(one, StoreError))
        return reports

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


def _runs(layout: Layout, held: Sequence[Mapping[str, tuple[int, int]]], ranks: int) -> Iterator[_Run]:
    """Every run of bytes with the rank that holds it and the rank that owns it, in the order of the image."""
    spans = []
    for rank in range(ranks):
        mine = share_of(layout, rank, ranks)
        if mine:
            last = layout.segments[mine[-1]]
            spans.append((rank, layout.segments[mine[0]].offset, last.offset + last.nbytes))
    for tensor in layout.tensors:
        for source, table in enumerate(held):
            start, stop = (tensor.offset + n * tensor.width for n in table.get(tensor.name, (0, 0)))
            for target, low, high in spans:
                begin, end = max(start, low), min(stop, high)
                if begin < end:
                    yield _Run(source, target, begin, end, tensor)


def _overlap(tensor: Tensor, begin: int, end: int) -> int:
    return max(0, min(tensor.offset + tensor.size * tensor.width, end) - max(tensor.offset, begin))
