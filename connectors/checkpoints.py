"""Checkpoints by their tables, in a folder or in an object store, readable without torch.

A checkpoint counts from the moment its table ``checkpoint.json`` is there: the table names every file with size and
digest and is written last. Where training reads on (lanes, manifests) stands in it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from headrace.connectors.stores.store import NoSuchKey, ObjectStore
from headrace.schemas.errors import HeadraceError

__all__ = (
    "TABLE",
    "BrokenCheckpoint",
    "CheckpointFile",
    "CheckpointTable",
    "checkpoint_prefix",
    "digest_of",
    "in_folder",
    "in_store",
)

TABLE = "checkpoint.json"
_FORMAT = "headrace-checkpoint/2"


class BrokenCheckpoint(HeadraceError):
    """A checkpoint that is torn, changed, or of another format; an older one has to do."""


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file of a checkpoint: bytes, and xxh3-128 of its content."""

    size: int
    xxh3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTable:
    """What a checkpoint stands for. manifests, lanes: the offsets at which training reads on."""

    lineage: int
    batch: int
    version: int
    manifests: int
    lanes: Mapping[int, int]
    written_ms: int
    files: Mapping[str, CheckpointFile]

    @property
    def name(self) -> str:
        """Lineage and batch, in the order of resuming."""
        return f"{self.lineage:04d}-{self.batch:09d}"

    def to_bytes(self) -> bytes:
        """As the file."""
        table = {"format": _FORMAT, **asdict(self), "lanes": {str(k): v for k, v in self.lanes.items()}}
        return json.dumps(table, indent=1).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes, where: str) -> "CheckpointTable":
        """From the file's bytes. Raises BrokenCheckpoint that names ``where``."""
        try:
            table: dict[str, Any] = json.loads(data)
            if table.pop("format") != _FORMAT:
                raise BrokenCheckpoint(f"{where} is not of the format {_FORMAT}")
            numbers = {key: int(table[key]) for key in ("lineage", "batch", "version", "manifests", "written_ms")}
            lanes = {int(lane): int(at) for lane, at in table["lanes"].items()}
            files = {str(n): CheckpointFile(int(f["size"]), str(f["xxh3"])) for n, f in table["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BrokenCheckpoint(f"{where} is no table of a checkpoint: {type(error).__name__} {error}") from error
        return cls(**numbers, lanes=lanes, files=files)


def checkpoint_prefix(run: str, policy: str) -> str:
    """Where a policy's checkpoints lie in an object store."""
    return f"checkpoints/{run}/{policy}"


def in_folder(root: Path) -> Iterator[tuple[Path, CheckpointTable | BrokenCheckpoint]]:
    """The checkpoints below a folder, by name: the folder of each, and its table or what is wrong with it.

    Sizes are compared, digests are not. What is being written, or was left by a kill, is not among them.
    """
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir() and not folder.name.startswith("."):
            yield folder, _table_in(folder)


def _table_in(folder: Path) -> CheckpointTable | BrokenCheckpoint:
    try:
        table = CheckpointTable.parse((folder / TABLE).read_bytes(), str(folder / TABLE))
        for name, file in table.files.items():
            found = (folder / name).stat().st_size
            if found != file.size:
                return BrokenCheckpoint(f"{folder / name} has {found} bytes, {file.size} were written")
    except OSError as error:
        return BrokenCheckpoint(f"{error.filename or folder}: {error.strerror}")
    except BrokenCheckpoint as error:
        return error
    return table


def in_store(store: ObjectStore, prefix: str) -> Iterator[tuple[str, CheckpointTable | BrokenCheckpoint]]:
    """The checkpoints below a prefix, by name: the prefix of each, and its table or what is wrong with it.

    One that is deleted meanwhile is not among them. Raises the store's errors.
    """
    for info in store.list(f"{prefix}/"):
        key, _, name = info.key.rpartition("/")
        if name == TABLE:
            where = f"{store.url}/{info.key}"
            try:
                yield key, CheckpointTable.parse(store.get(info.key), where)
            except BrokenCheckpoint as error:
                yield key, error
            except NoSuchKey:  # pruned, or replaced by a later attempt, since the listing
                continue


def digest_of(blocks: Iterable[bytes]) -> str:
    """xxh3-128 of a file given in blocks, as hex digits."""
    digest = xxhash.xxh3_128()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()
