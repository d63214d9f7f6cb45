"""Brings the runs of tensors that ranks hold to the ranks that own those bytes of the image.

Goes in: on every rank the shards of the parameters that it holds anyway; comes out: each rank's own part of the image.
A byte crosses between ranks only where its owner is another rank; nobody gathers the model. Calls are collective.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from headrace.schemas.delta_layout import DeltaError, Layout, Tensor
from headrace.trainers.backends.backend import Shards
from headrace.trainers.ranks import Ranks
from headrace.trainers.version_share import share_of

__all__ = ("Exchange", "exchange", "plan_exchange")


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of the image that one rank holds and another owns."""

    source: int
    target: int
    begin: int
    end: int
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank sends to each rank and gets from each (itself included), in the order of the image.

    begin: where its part of the image begins, in bytes.
    """

    begin: int
    outgoing: Mapping[int, Sequence[_Run]]
    incoming: Mapping[int, Sequence[_Run]]


def plan_exchange(layout: Layout, held: Sequence[Mapping[str, tuple[int, int]]], ranks: Ranks) -> Exchange:
    """The exchange for what all ranks hold; the same table on every rank.

    held: for every rank, name -> elements (start, stop). Raises DeltaError, on all ranks alike, unless they hold every
    element once.
    """
    spans = []
    for rank in range(ranks.size):
        mine = share_of(layout, rank, ranks.size)
        if mine:
            last = layout.segments[mine[-1]]
            spans.append((rank, layout.segments[mine[0]].offset, last.offset + last.nbytes))
    outgoing: dict[int, list[_Run]] = {}
    incoming: dict[int, list[_Run]] = {}
    ends = [high for _, _, high in spans]
    for tensor in layout.tensors:
        every = [(source, *table.get(tensor.name, (0, 0))) for source, table in enumerate(held)]
        parts = [(source, start, stop) for source, start, stop in every if stop > start]
        _refuse_gaps(tensor, [(start, stop) for _, start, stop in parts])
        for source, start, stop in parts:
            low, high = tensor.offset + start * tensor.width, tensor.offset + stop * tensor.width
            for target, begin, end in spans[bisect_right(ends, low) :]:
                if begin >= high:
                    break
                run = _Run(source, target, max(low, begin), min(high, end), tensor)
                if source == ranks.rank:
                    outgoing.setdefault(target, []).append(run)
                if target == ranks.rank:
                    incoming.setdefault(source, []).append(run)
    mine = share_of(layout, ranks.rank, ranks.size)
    return Exchange(layout.segments[mine.start].offset if mine else 0, outgoing, incoming)


def exchange(plan: Exchange, shards: Shards, ranks: Ranks, room: NDArray[np.uint8]) -> None:
    """Fill ``room``, this rank's part of the image; all ranks call it with plans of the same table."""

    def piece(run: _Run) -> NDArray[np.uint8]:
        shard = shards[run.tensor.name]
        octets = np.ascontiguousarray(shard.bits).view(np.uint8)
        at = run.begin - run.tensor.offset - shard.start * run.tensor.width
        return octets[at : at + run.end - run.begin]

    come: list[tuple[Sequence[_Run], torch.Tensor]] = []
    operations: list[dist.P2POp] = []
    for other in range(ranks.size):
        outgoing, incoming = plan.outgoing.get(other, ()), plan.incoming.get(other, ())
        if other == ranks.rank:
            for run in outgoing:
                room[run.begin - plan.begin : run.end - plan.begin] = piece(run)
            continue
        if outgoing:
            message = torch.from_numpy(np.concatenate([piece(run) for run in outgoing])).to(ranks.device)
            operations.append(dist.P2POp(dist.isend, message, other, ranks.group))
        if incoming:
            nbytes = sum(run.end - run.begin for run in incoming)
            message = torch.empty(nbytes, dtype=torch.uint8, device=ranks.device)
            operations.append(dist.P2POp(dist.irecv, message, other, ranks.group))
            come.append((incoming, message))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for incoming, message in come:
        octets, at = message.cpu().numpy(), 0
        for run in incoming:
            room[run.begin - plan.begin : run.end - plan.begin] = octets[at : at + run.end - run.begin]
            at += run.end - run.begin


def _refuse_gaps(tensor: Tensor, parts: Sequence[tuple[int, int]]) -> None:
    """Raise DeltaError unless parts cover a tensor, each element once."""
    at = 0
    for start, stop in sorted(parts):
        if start != at:
            break
        at = stop
    if at != tensor.size or sum(stop - start for start, stop in parts) != tensor.size:
        raise DeltaError(f"the ranks hold elements {sorted(parts)} of {tensor.name}, which has {tensor.size}")
