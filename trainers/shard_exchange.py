"""Brings the runs of tensors that ranks hold to the ranks that own those bytes of the image.

Goes in: on every rank the shards of the parameters that it holds anyway; comes out: each rank's own part of the image.
A byte crosses between ranks only where its owner is another rank; nobody gathers the model. Calls are collective.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from headrace.schemas.delta_layout import DeltaError, Layout, Tensor
from headrace.trainers.backends.backend import Shards
from headrace.trainers.ranks import Ranks
from headrace.trainers.version_share import share_of

__all__ = ("exchange",)


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of the image that one rank holds and another owns."""

    source: int
    target: int
    begin: int
    end: int
    tensor: Tensor


def exchange(
    layout: Layout,
    shards: Shards,
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

    come: list[tuple[list[_Run], torch.Tensor]] = []
    operations: list[dist.P2POp] = []
    for other in range(ranks.size):
        outgoing = [run for run in runs if (run.source, run.target) == (ranks.rank, other)]
        if other == ranks.rank:
            for run in outgoing:
                room[run.begin - begin : run.end - begin] = piece(run)
            continue
        incoming = [run for run in runs if (run.source, run.target) == (other, ranks.rank)]
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
            room[run.begin - begin : run.end - begin] = octets[at : at + run.end - run.begin]
            at += run.end - run.begin


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
