"""Checkpoints: one folder each, whole or absent, from which alone training resumes (protocol 8).

A checkpoint holds the backend's state of every rank, the batch and lineage that it stands for, and where each lane and
the manifests are to be read on. It is written beside its place, synced and renamed; its table of files with sizes and
digests is written last, so a torn one is seen and ignored.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from headrace.trainers.lineage import Point
from headrace.trainers.ranks import Ranks

__all__ = ("Checkpoint", "CheckpointFolder", "Positions")

_TABLE = "checkpoint.json"
_FORMAT = "headrace-checkpoint/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Where to read on: offset in the policy's partition of ``manifests``, and in each lane of its batch topic."""

    manifests: int
    lanes: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    point: Point
    positions: Positions
    folder: Path


class CheckpointFolder:
    """The checkpoints of one policy below ``root``; on several machines a folder that all ranks share."""

    def __init__(self, root: Path, *, keep: int) -> None:
        self._root, self._keep = root, keep

    def all(self) -> list[Checkpoint]:
        """Whole checkpoints, oldest (lineage, batch) first; files are read once to check their digests."""
        return self._found(check=True)

    def _found(self, *, check: bool) -> list[Checkpoint]:
        found = [c for folder in self._folders() if (c := _read(folder, check)) is not None]
        return sorted(found, key=lambda c: c.point)

    def _folders(self) -> Iterator[Path]:
        if self._root.is_dir():
            yield from (path for path in self._root.iterdir() if path.is_dir() and not path.name.startswith("."))

    def write(self, point: Point, positions: Positions, save: Callable[[Path], None], ranks: Ranks) -> Path:
        """Write a checkpoint; collective. ``save`` puts a rank's part into a folder. Durable when it returns."""
        target = self._root / f"{point.lineage:04d}-{point.batch:09d}"
        beside = self._root / f".{target.name}.part"
        if ranks.leads:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        ranks.barrier()
        save(beside)
        ranks.barrier()
        if ranks.leads:
            _seal(beside, point, positions)
            if target.exists():  # of an earlier attempt at this batch
                shutil.rmtree(target)
            beside.rename(target)
            _sync(self._root)
        ranks.barrier()
        return target

    def prune(self, base: Point | None) -> None:
        """Remove all but the newest ``keep``; the one that the lineage in force starts from stays as well."""
        whole = self._found(check=False)
        for old in whole[: -self._keep]:
            if base is None or old.point != base:
                shutil.rmtree(old.folder, ignore_errors=True)
        for torn in self._root.glob(".*.part"):
            shutil.rmtree(torn, ignore_errors=True)


def _seal(folder: Path, point: Point, positions: Positions) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _sync(path)
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "xxh3": _digest(path)}
    table = {
        "format": _FORMAT,
        **asdict(point),
        "manifests": positions.manifests,
        "lanes": {str(lane): offset for lane, offset in positions.lanes.items()},
        "written_ms": int(time.time() * 1000),
        "files": files,
    }
    path = folder / _TABLE
    path.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    _sync(path)
    for inner in (p for p in folder.rglob("*") if p.is_dir()):
        _sync(inner)
    _sync(folder)


def _read(folder: Path, check: bool) -> Checkpoint | None:
    """The checkpoint in a folder, None when it is torn or of another format; ``check``: the digests too."""
    try:
        table: dict[str, Any] = json.loads((folder / _TABLE).read_text("utf-8"))
        if table["format"] != _FORMAT:
            return None
        for name, file in table["files"].items():
            path = folder / name
            if path.stat().st_size != file["size"] or (check and _digest(path) != file["xxh3"]):
                return None
        return Checkpoint(
            point=Point(lineage=table["lineage"], batch=table["batch"], version=table["version"]),
            positions=Positions(
                manifests=table["manifests"], lanes={int(lane): at for lane, at in table["lanes"].items()}
            ),
            folder=folder,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
