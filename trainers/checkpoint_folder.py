"""Checkpoints in a folder: on one machine the run folder, on several a file system that all ranks share.

Ranks put their files into a hidden folder of the attempt; rank 0 adds the table and renames it into place. Files, the
table and both folders are synced before the name appears, so what is found after a power cut is whole.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from headrace.connectors.checkpoints import (
    TABLE,
    BrokenCheckpoint,
    CheckpointFile,
    CheckpointTable,
    digest_of,
    in_folder,
)
from headrace.trainers.checkpoint import Checkpoint, Delivery, Save

__all__ = ("FolderPlace", "blocks_of", "parse_delivery", "sync", "tidy_away")

_BLOCK = 8 << 20


class FolderPlace:
    """The checkpoints of one policy below ``root``; see ``Place``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        """The folder."""
        return str(self._root)

    def listed(self) -> tuple[list[Checkpoint], list[BrokenCheckpoint]]:
        """See ``Place``."""
        whole: list[Checkpoint] = []
        broken: list[BrokenCheckpoint] = []
        for folder, table in in_folder(self._root):
            if isinstance(table, BrokenCheckpoint):
                broken.append(table)
            else:
                whole.append(Checkpoint.of(str(folder), table))
        return sorted(whole, key=lambda c: c.point), broken

    def room(self, save: Save, rank: int) -> Path:
        """See ``Place``."""
        room = self._part(save) / f"rank-{rank:05d}"
        room.mkdir(parents=True)
        return room

    def deliver(self, save: Save, rank: int, delivery: Delivery) -> None:
        """See ``Place``."""
        part = self._part(save)
        room = part / f"rank-{rank:05d}"
        for name in delivery.files:
            sync(room / name)
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (room / name).rename(part / name)
        shutil.rmtree(room, ignore_errors=True)
        marker = part / f".delivery-{rank:05d}"
        marker.write_text(json.dumps(asdict(delivery)), "utf-8")
        marker.rename(part / f"delivery-{rank:05d}.json")

    def delivered(self, save: Save) -> dict[int, Delivery]:
        """See ``Place``."""
        return {_rank_of(path.name): parse_delivery(path.read_bytes()) for path in self._deliveries(save)}

    def commit(self, save: Save, table: CheckpointTable) -> None:
        """See ``Place``."""
        part, target = self._part(save), self._root / save.name
        for marker in self._deliveries(save):
            marker.unlink()
        (part / TABLE).write_bytes(table.to_bytes())
        sync(part / TABLE)
        for folder in (part, *(path for path in part.rglob("*") if path.is_dir())):
            sync(folder)
        if target.exists():  # of an earlier attempt at this batch
            replaced = self._root / f".{target.name}.{save.attempt}.replaced"
            target.rename(replaced)
            part.rename(target)
            tidy_away(replaced)
        else:
            part.rename(target)
        sync(self._root)

    def discard(self, save: Save) -> None:
        """See ``Place``."""
        tidy_away(self._part(save))

    def check(self, checkpoint: Checkpoint) -> None:
        """See ``Place``."""
        folder = Path(checkpoint.where)
        for name, file in checkpoint.table.files.items():
            try:
                found = digest_of(blocks_of(folder / name))
            except OSError as error:
                raise BrokenCheckpoint(f"{folder / name}: {error.strerror}") from error
            if found != file.xxh3:
                raise BrokenCheckpoint(f"{folder / name} was changed: its digest is {found}, {file.xxh3} was written")

    def fetch(self, checkpoint: Checkpoint) -> Path:
        """See ``Place``."""
        return Path(checkpoint.where)

    def release(self, folder: Path) -> None:
        """See ``Place``; the checkpoint itself was given out."""

    def remove(self, checkpoint: Checkpoint) -> None:
        """See ``Place``."""
        folder = Path(checkpoint.where)
        (folder / TABLE).unlink(missing_ok=True)
        tidy_away(folder)

    def sweep(self) -> None:
        """See ``Place``."""
        for pattern in (".*.part", ".*.replaced"):
            for left in self._root.glob(pattern):
                tidy_away(left)

    def _part(self, save: Save) -> Path:
        return self._root / f".{save.name}.{save.attempt}.part"

    def _deliveries(self, save: Save) -> list[Path]:
        return sorted(self._part(save).glob("delivery-*.json"))


def _rank_of(name: str) -> int:
    return int(name.removeprefix("delivery-").removesuffix(".json"))


def parse_delivery(data: bytes) -> Delivery:
    """A rank's delivery as it was written."""
    found = json.loads(data)
    files = {name: CheckpointFile(file["size"], file["xxh3"]) for name, file in found["files"].items()}
    return Delivery(files, found["problem"])


def blocks_of(path: Path, block: int = _BLOCK) -> Iterator[bytes]:
    """The content of a file in blocks."""
    with path.open("rb") as file:
        while data := file.read(block):
            yield data


def sync(path: Path) -> None:
    """Make a file or a folder's entries durable."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def tidy_away(folder: Path) -> None:
    """Remove a folder with all that is in it, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)
