"""An object store in a directory, with the semantics of S3: atomic puts, create-only puts with one winner, listings.

Goes in: keys and bytes; comes out: files named by their keys. A put writes a temporary file beside its target and then
links (create-only) or renames it into place, so no reader sees a torn object and no racer wins twice.
"""

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headrace.connectors.stores.store import (
    AlreadyExists,
    NoSuchKey,
    ObjectInfo,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    UnsafeKey,
    check_key,
    check_prefix,
    is_key,
)

__all__ = ("LocalStore",)

_PERSON = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS}


class LocalStore:
    """Objects as files under ``root``; made when missing.

    durable: fsync file and folder of every put, so that an acknowledged object survives a power cut, at some 20 ms a
    put (a killed process loses nothing either way). Raises StoreRefused when ``root`` cannot be made or is a file.
    """

    def __init__(self, root: Path | str, *, durable: bool = False) -> None:
        self._root = Path(root).absolute()
        self._durable = durable
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreRefused(f"store folder {self._root} cannot be used: {error.strerror}") from error

    @property
    def url(self) -> str:
        """The folder as ``file://`` URL."""
        return self._root.as_uri()

    @property
    def root(self) -> Path:
        """The folder that holds the objects."""
        return self._root

    def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        """Write a whole object atomically (see ``ObjectStore.put``)."""
        target = self._path(key)
        temporary = target.parent / f".{uuid.uuid4().hex}.part"
        try:
            there = target.parent
            while not there.is_dir():
                there = there.parent
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(data)
                if self._durable:
                    file.flush()
                    os.fsync(file.fileno())
            if create_only:
                os.link(temporary, target)
            else:
                temporary.replace(target)
            if self._durable:
                _sync_folders(target.parent, there)
        except FileExistsError as error:
            if target.is_dir() or not target.parent.is_dir():
                raise self._colliding(key) from error
            raise AlreadyExists(f"{self.url}: object {key} exists; a create-only put lost") from error
        except (IsADirectoryError, NotADirectoryError) as error:
            raise self._colliding(key) from error
        except OSError as error:
            raise self._explained(error, key, "write") from error
        finally:
            with suppress(OSError):
                temporary.unlink()

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes of an object (see ``ObjectStore.get``)."""
        try:
            with self._path(key).open("rb") as file:
                if start:
                    file.seek(start)
                return file.read() if end is None else file.read(max(0, end - (start or 0)))
        except OSError as error:
            raise self._explained(error, key, "read") from error

    def head(self, key: str) -> ObjectInfo:
        """Size and time of an object (see ``ObjectStore.head``)."""
        path = self._path(key)
        try:
            status = path.stat()
        except OSError as error:
            raise self._explained(error, key, "look up") from error
        if path.is_dir():
            raise NoSuchKey(f"{self.url}: no object {key}")
        return ObjectInfo(key, status.st_size, status.st_mtime)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects by prefix in the order of their keys (see ``ObjectStore.list``)."""
        folder, _, _ = check_prefix(prefix).rpartition("/")
        try:
            keys = sorted(self._keys(self._root / folder, f"{folder}/" if folder else "", prefix, start_after))
        except OSError as error:
            raise self._explained(error, prefix, "list") from error
        for key in keys:
            with suppress(NoSuchKey):
                yield self.head(key)

    def delete(self, key: str) -> None:
        """Remove an object (see ``ObjectStore.delete``)."""
        try:
            self._path(key).unlink(missing_ok=True)
        except (IsADirectoryError, NotADirectoryError):
            return
        except OSError as error:
            raise self._explained(error, key, "delete") from error

    def sweep_unfinished(self, prefix: str, before: float) -> int:
        """Remove temporary files of killed writers (see ``ObjectStore.sweep_unfinished``)."""
        folder, _, _ = check_prefix(prefix).rpartition("/")
        swept = 0
        try:
            for path in (self._root / folder).rglob(".*.part"):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < before:
                        path.unlink()
                        swept += 1
        except OSError as error:
            raise self._explained(error, prefix, "sweep") from error
        return swept

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _keys(self, folder: Path, stem: str, prefix: str, start_after: str) -> Iterator[str]:
        """Keys below ``folder``, skipping what cannot match; a folder that is removed meanwhile is empty."""
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            key = stem + entry.name
            if not is_key(entry.name):
                continue
            if entry.is_dir():
                if key.startswith(prefix) or prefix.startswith(f"{key}/"):
                    yield from self._keys(folder / entry.name, f"{key}/", prefix, start_after)
            elif key.startswith(prefix) and key > start_after:
                yield key

    def _colliding(self, key: str) -> UnsafeKey:
        return UnsafeKey(
            f"{self.url}: cannot write {key}: an object has the name of a folder, or a folder that of the object; "
            "choose another key"
        )

    def _explained(self, error: OSError, key: str, verb: str) -> StoreError:
        where = f"{self.url}: cannot {verb} {key}: {error.strerror}"
        if error.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR):
            return NoSuchKey(f"{self.url}: no object {key}")
        if error.errno in _PERSON:
            return StoreRefused(f"{where}; check owner and mount, a local store needs write access and hard links")
        if error.errno == errno.ENOSPC:
            return StoreUnavailable(f"{where}; free disk space, then the same call succeeds")
        return StoreUnavailable(where)


def _sync_folders(folder: Path, oldest: Path) -> None:
    """fsync a folder and its parents up to the one that was there before: a new name lives in its folder's own data."""
    while True:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        if folder == oldest:
            return
        folder = folder.parent
