"""The processes of one trainer: who this one is, and the few collectives that they need.

Under ``torchrun`` the ranks talk by torch.distributed (gloo on CPU, nccl on GPU); alone, every collective is the
identity. All ranks call the same collectives in the same order; rank 0 decides and broadcasts.
"""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.schemas.errors import ConfigurationError

__all__ = ("Ranks",)

T = TypeVar("T")
_PATIENCE = timedelta(days=7)
"""How long a rank waits for the others: rank 0 may wait for data, and a dead peer breaks the connection at once."""


class Ranks:
    """Rank ``rank`` of ``size``; ``device`` is this rank's GPU, or the CPU. group: None is that of all processes.

    sharing: so many neighbours have the same data and share the tokens of every sequence (Ulysses).
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, sharing: int = 1) -> None:
        self.rank, self.size, self.group, self.sharing = rank, size, group, sharing
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")

    @classmethod
    def from_environment(cls, *, group: bool = False, sharing: int = 1) -> "Ranks":
        """Rank and size as torchrun sets them; opens the process group when there are several ranks.

        ``group``: also alone, for backends that insist on one. A process of its own needs no port for it. Raises
        ConfigurationError when the ranks cannot be divided among ``sharing`` neighbours.
        """
        ranks = cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), sharing=sharing)
        if ranks.size % sharing:
            raise ConfigurationError(f"trainer.sequence_parallel {sharing} does not divide the {ranks.size} ranks")
        if ranks.device.type == "cuda":
            torch.cuda.set_device(ranks.device)
        if (group or ranks.size > 1) and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
            store = dist.HashStore() if ranks.size == 1 else None  # type: ignore[attr-defined]
            alone = {"store": store, "rank": 0, "world_size": 1} if store is not None else {}
            dist.init_process_group(backend, timeout=_PATIENCE, **alone)  # type: ignore[arg-type]
        return ranks

    def beside(self) -> "Ranks":
        """The same ranks on connections of their own through host memory, for another thread's calls; collective."""
        group = dist.new_group(backend="gloo", timeout=_PATIENCE) if self.size > 1 else None
        twin = Ranks(self.rank, self.size, group, self.sharing)
        twin.device = torch.device("cpu")
        return twin

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank trains on; neighbours that share sequences have the same."""
        return self.rank // self.sharing

    @property
    def data_size(self) -> int:
        """Into how many parts the data is divided."""
        return self.size // self.sharing

    def neighbours(self) -> Any:
        """The process group of the ranks that share this one's sequences, None for a rank alone; collective."""
        if self.sharing == 1:
            return None
        own = None
        for first in range(0, self.size, self.sharing):
            group = dist.new_group(list(range(first, first + self.sharing)), timeout=_PATIENCE)
            own = group if first <= self.rank < first + self.sharing else own
        return own

    @property
    def leads(self) -> bool:
        """True on rank 0, which alone writes to Kafka and to the store."""
        return self.rank == 0

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value on every rank (pickled)."""
        if self.size == 1:
            return value  # type: ignore[return-value]
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"), group=self.group)
        found: T = box[0]
        return found

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank (pickled)."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value, group=self.group)
        return box

    def add_up(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over the parts of the data; a key may be missing in some of them."""
        total: dict[str, float] = {}
        for part in self.gather(dict(values))[:: self.sharing]:
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def largest(self, values: Mapping[str, float]) -> dict[str, float]:
        """Maxima over ranks; a key may be missing on some of them."""
        top: dict[str, float] = {}
        for part in self.gather(dict(values)):
            for name, value in part.items():
                top[name] = max(top.get(name, value), value)
        return top

    def sum_tensor(self, x: Tensor) -> None:
        """Add a tensor up over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            self.gather(None)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
