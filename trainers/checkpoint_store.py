"""Checkpoints in an object store, for ranks that share no file system.

Files go up in parts of 64 MB under keys that only this attempt uses; the put of the table is the commit. A reader
fetches the parts into a local folder, once for all ranks of a machine, and compares digests there.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from headrace.connectors.checkpoints import (
    TABLE,
    BrokenCheckpoint,
    CheckpointFile,
    CheckpointTable,
    digest_of,
    in_store,
)
from headrace.connectors.stores.store import NoSuchKey, ObjectStore, StoreUnavailable
from headrace.trainers.checkpoint import Checkpoint, Delivery, Save
from headrace.trainers.checkpoint_folder import blocks_of, parse_delivery, tidy_away

__all__ = ("StorePlace",)

PART_BYTES = 64 << 20


class StorePlace:
    """The checkpoints of one policy below ``prefix``; ``scratch``: a local folder. See ``Place``."""

    def __init__(self, store: ObjectStore, prefix: str, scratch: Path) -> None:
        self._store, self._prefix, self._scratch = store, prefix, scratch

    @property
    def url(self) -> str:
        """Store and prefix."""
        return f"{self._store.url}/{self._prefix}"

    def listed(self) -> tuple[list[Checkpoint], list[BrokenCheckpoint]]:
        """See ``Place``; of several attempts at one batch the newest counts."""
        newest: dict[str, Checkpoint] = {}
        broken: list[BrokenCheckpoint] = []
        for prefix, table in in_store(self._store, self._prefix):
            if isinstance(table, BrokenCheckpoint):
                broken.append(table)
                continue
            found = newest.get(table.name)
            if found is None or found.table.written_ms < table.written_ms:
                newest[table.name] = Checkpoint.of(prefix, table)
        return sorted(newest.values(), key=lambda c: c.point), broken

    def room(self, save: Save, rank: int) -> Path:
        """See ``Place``."""
        room = self._scratch / f".{save.name}.{save.attempt}.{rank:05d}.part"
        room.mkdir(parents=True)
        return room

    def deliver(self, save: Save, rank: int, delivery: Delivery) -> None:
        """See ``Place``."""
        room = self._scratch / f".{save.name}.{save.attempt}.{rank:05d}.part"
        again = False
        try:
            for name in delivery.files:
                for number, part in enumerate(blocks_of(room / name, PART_BYTES)):
                    self._store.put(_part_key(self._key(save), name, number), part)
            self._store.put(f"{self._key(save)}/delivery-{rank:05d}.json", json.dumps(asdict(delivery)).encode())
        except StoreUnavailable:
            again = True  # the same call is made when the store is back: the files have to be there
            raise
        finally:
            if not again:
                tidy_away(room)

    def delivered(self, save: Save) -> dict[int, Delivery]:
        """See ``Place``."""
        stem = f"{self._key(save)}/delivery-"
        keys = [info.key for info in self._store.list(stem)]
        return {int(key.removeprefix(stem)[:5]): parse_delivery(self._store.get(key)) for key in keys}

    def commit(self, save: Save, table: CheckpointTable) -> None:
        """See ``Place``."""
        older = [c for c in self.listed()[0] if c.table.name == save.name]
        self._store.put(f"{self._key(save)}/{TABLE}", table.to_bytes())
        for replaced in older:
            self.remove(replaced)

    def discard(self, save: Save) -> None:
        """See ``Place``."""
        for info in list(self._store.list(f"{self._key(save)}/")):
            self._store.delete(info.key)

    def check(self, checkpoint: Checkpoint) -> None:
        """See ``Place``."""
        self.fetch(checkpoint)

    def fetch(self, checkpoint: Checkpoint) -> Path:
        """See ``Place``; a file has its name only once its digest was found right."""
        target = self._scratch / ".fetched" / checkpoint.where.replace("/", "_")
        target.mkdir(parents=True, exist_ok=True)
        with _alone(target.parent / f"{target.name}.lock"):
            for name, file in checkpoint.table.files.items():
                if not (target / name).exists():
                    self._download(checkpoint, name, target / name, file)
        return target

    def _download(self, checkpoint: Checkpoint, name: str, path: Path, file: CheckpointFile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        coming = path.with_name(f".{path.name}.coming")
        with coming.open("wb") as out:
            for number in range(-(-file.size // PART_BYTES)):
                key = _part_key(checkpoint.where, name, number)
                try:
                    out.write(self._store.get(key))
                except NoSuchKey as error:
                    raise BrokenCheckpoint(f"{self._store.url}/{key} is not there") from error
        found = digest_of(blocks_of(coming))
        if found != file.xxh3:
            raise BrokenCheckpoint(
                f"{self._store.url}/{checkpoint.where}/{name} has digest {found}, {file.xxh3} was written"
            )
        coming.rename(path)

    def release(self, folder: Path) -> None:
        """See ``Place``."""
        tidy_away(folder)

    def remove(self, checkpoint: Checkpoint) -> None:
        """See ``Place``."""
        self._store.delete(f"{checkpoint.where}/{TABLE}")
        for info in list(self._store.list(f"{checkpoint.where}/")):
            self._store.delete(info.key)

    def sweep(self) -> None:
        """See ``Place``."""
        tidy_away(self._scratch / ".fetched")
        for left in self._scratch.glob(".*.part"):
            tidy_away(left)
        tables, others = set[str](), list[str]()
        for info in self._store.list(f"{self._prefix}/"):
            folder, _, name = info.key.rpartition("/")
            if name == TABLE:
                tables.add(folder)
            else:
                others.append(info.key)
        for key in others:
            attempt = "/".join(key.removeprefix(f"{self._prefix}/").split("/")[:2])
            if f"{self._prefix}/{attempt}" not in tables:
                self._store.delete(key)

    def _key(self, save: Save) -> str:
        return f"{self._prefix}/{save.name}/{save.attempt}"


def _part_key(stem: str, name: str, number: int) -> str:
    return f"{stem}/{name}/{number:06d}"


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process of this machine at a time."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
