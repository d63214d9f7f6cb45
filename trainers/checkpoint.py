"""What a checkpoint is to the trainer, and the contract of the places that keep them (protocol 8).

From a checkpoint alone training resumes: the backend's state of every rank, the batch and lineage that it stands for,
and where each lane and the manifests are to be read on. It is whole or absent, whenever its writers die.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.connectors.checkpoints import BrokenCheckpoint, CheckpointFile, CheckpointTable
from headrace.trainers.lineage import Point

__all__ = ("Checkpoint", "Delivery", "Place", "Positions", "Save")


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Where to read on: offset in the policy's partition of ``manifests``, and in each lane of its batch topic."""

    manifests: int
    lanes: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that has its table; ``where``: its folder or prefix in the place that keeps it."""

    point: Point
    positions: Positions
    table: CheckpointTable
    where: str

    @classmethod
    def of(cls, where: str, table: CheckpointTable) -> "Checkpoint":
        """From a table."""
        point = Point(lineage=table.lineage, batch=table.batch, version=table.version)
        return cls(
            point=point, positions=Positions(manifests=table.manifests, lanes=table.lanes), table=table, where=where
        )


@dataclass(frozen=True, slots=True)
class Save:
    """One attempt to write a checkpoint; no two attempts share a file, so a late writer harms nobody."""

    name: str
    attempt: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a rank has brought: its files, or why it could not."""

    files: Mapping[str, CheckpointFile]
    problem: str = ""


class Place(Protocol):
    """Where a policy's checkpoints lie. Methods may be called from another thread; they raise OSError and the errors
    of object stores.
    """

    @property
    def url(self) -> str:
        """For messages."""
        ...

    def listed(self) -> tuple[list[Checkpoint], list[BrokenCheckpoint]]:
        """Checkpoints by their tables, oldest first, and what is wrong with the others; contents are not read."""
        ...

    def room(self, save: Save, rank: int) -> Path:
        """An empty local folder for a rank's files; ``deliver`` takes them from there."""
        ...

    def deliver(self, save: Save, rank: int, delivery: Delivery) -> None:
        """Make a rank's files durable and say so to rank 0, or say what went wrong."""
        ...

    def delivered(self, save: Save) -> dict[int, Delivery]:
        """What ranks have delivered so far."""
        ...

    def commit(self, save: Save, table: CheckpointTable) -> None:
        """Make the delivered files a checkpoint, durable when it returns; one of the same name is replaced."""
        ...

    def discard(self, save: Save) -> None:
        """Remove what an attempt has left."""
        ...

    def check(self, checkpoint: Checkpoint) -> None:
        """Read all of it and compare digests. Raises BrokenCheckpoint."""
        ...

    def fetch(self, checkpoint: Checkpoint) -> Path:
        """A local folder with its files, to load from once ``check`` has passed. Raises BrokenCheckpoint."""
        ...

    def release(self, folder: Path) -> None:
        """The fetched folder is not needed any more."""
        ...

    def remove(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint, its table first."""
        ...

    def sweep(self) -> None:
        """Remove what attempts of other processes have left; call it once predecessors are fenced."""
        ...
