"""Where the broker keeps bytes: a small interface, and its form on disk and in memory.

The state machines (log, journals) see only `Storage` and `LogFile`. `DiskStorage` hands every append to the operating
system before it returns, so data acknowledged by the broker outlives a killed process (not a power cut: nothing is
fsynced). An append that fails leaves the file as it was.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple, Protocol


class StorageError(Exception):
    """Bytes could not be written: disk full, quota, file size limit or a broken device."""


class LogFile(Protocol):
    """An append-only file."""

    size: int
    """Bytes in the file."""

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Write at the end; raises `StorageError` and keeps the old end when not all of it could be written."""

    def read(self, position: int, size: int) -> bytes:
        """At most `size` bytes from `position`."""

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""

    def fileno(self) -> int:
        """The descriptor to send from, -1 when there is none."""


class Storage(Protocol):
    """A folder tree of append-only files; names are relative with `/` between parts."""

    def open(self, name: str) -> LogFile:
        """Open a file and create it, with its folder, when missing."""

    def names(self, folder: str) -> list[str]:
        """Sorted names of what lies directly in a folder; empty when there is no such folder."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, replacing in one step what has that name."""

    def remove(self, name: str) -> None:
        """Remove a file; readers that still hold it can finish. Missing files are ignored."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder and all below it."""


class FileSlice(NamedTuple):
    """Part of a file, to be sent as it is."""

    file: LogFile
    position: int
    size: int


class DiskFile:
    """`LogFile` over a descriptor; closed when the last holder lets go, so a removed file stays readable for it."""

    __slots__ = ("_fd", "size")

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self._fd).st_size

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """See `LogFile.append`."""
        written = 0
        try:
            written = os.pwrite(self._fd, data, self.size)
            while written < len(data):
                written += os.pwrite(self._fd, memoryview(data)[written:], self.size + written)
        except OSError as error:
            os.ftruncate(self._fd, self.size)
            raise StorageError(f"{error.strerror} after {written} of {len(data)} bytes") from error
        self.size += written

    def read(self, position: int, size: int) -> bytes:
        """See `LogFile.read`."""
        return os.pread(self._fd, size, position)

    def truncate(self, size: int) -> None:
        """See `LogFile.truncate`."""
        os.ftruncate(self._fd, size)
        self.size = size

    def fileno(self) -> int:
        """See `LogFile.fileno`."""
        return self._fd

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DiskStorage:
    """`Storage` below one folder of a local file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def open(self, name: str) -> LogFile:
        """See `Storage.open`; raises `StorageError` when the file cannot be made."""
        path = self.root / name
        try:
            try:
                return DiskFile(path)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                return DiskFile(path)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error

    def names(self, folder: str) -> list[str]:
        """See `Storage.names`."""
        try:
            return sorted(path.name for path in (self.root / folder).iterdir())
        except FileNotFoundError:
            return []

    def rename(self, old: str, new: str) -> None:
        """See `Storage.rename`."""
        (self.root / old).replace(self.root / new)

    def remove(self, name: str) -> None:
        """See `Storage.remove`."""
        (self.root / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        """See `Storage.remove_folder`."""
        shutil.rmtree(self.root / name, ignore_errors=True)


class MemoryFile:
    """`LogFile` in memory; `limit` bytes at most, to act out a full disk."""

    def __init__(self, limit: int | None = None) -> None:
        self.data = bytearray()
        self.limit = limit

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return len(self.data)

    @size.setter
    def size(self, value: int) -> None:
        self.truncate(value)

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """See `LogFile.append`."""
        if self.limit is not None and len(self.data) + len(data) > self.limit:
            raise StorageError(f"the limit of {self.limit} bytes is reached")
        self.data += data

    def read(self, position: int, size: int) -> bytes:
        """See `LogFile.read`."""
        return bytes(self.data[position : position + size])

    def truncate(self, size: int) -> None:
        """See `LogFile.truncate`."""
        del self.data[size:]

    def fileno(self) -> int:
        """See `LogFile.fileno`: there is no descriptor."""
        return -1


class MemoryStorage:
    """`Storage` in memory, for tests and simulation; what is in it survives a new broker on the same object."""

    def __init__(self) -> None:
        self.files: dict[str, MemoryFile] = {}

    def open(self, name: str) -> LogFile:
        """See `Storage.open`."""
        return self.files.setdefault(name, MemoryFile())

    def names(self, folder: str) -> list[str]:
        """See `Storage.names`."""
        prefix = folder + "/" if folder else ""
        return sorted({n[len(prefix) :].split("/")[0] for n in self.files if n.startswith(prefix)})

    def rename(self, old: str, new: str) -> None:
        """See `Storage.rename`."""
        self.files[new] = self.files.pop(old)

    def remove(self, name: str) -> None:
        """See `Storage.remove`."""
        self.files.pop(name, None)

    def remove_folder(self, name: str) -> None:
        """See `Storage.remove_folder`."""
        for file in [n for n in self.files if n.startswith(name + "/")]:
            del self.files[file]
