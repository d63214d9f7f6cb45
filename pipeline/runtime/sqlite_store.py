"""A store whose committed map is an SQLite file, for state that is larger than memory.

Same contract as the store in memory. The file is scratch: the changelog alone is durable, so it is made anew for every
task, written without syncing, never shared between workers, and removed when the task is closed.
"""

import sqlite3
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headrace.pipeline.runtime.store import OverlayStore
from headrace.schemas.errors import HeadraceError

__all__ = ("SqliteStore", "StoreFile")

_PAGE = 256
"""Entries that a scan reads at once: memory stays bounded, whatever the store holds."""


class StoreFile(HeadraceError):
    """The file of a store cannot be made, read or written: disk full, no rights, or somebody else's hand in it."""


class SqliteStore(OverlayStore):
    """Entries in one table of a file under ``folder``; the overlay stays in memory until the commit."""

    def __init__(self, folder: Path, name: str) -> None:
        """Make the file ``name`` (and a random part). Raises StoreFile."""
        super().__init__()
        self._path = folder / f"{name}-{uuid.uuid4().hex[:8]}.sqlite"
        self._version = 0
        """Grows with every change of the committed map."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Every task of a worker lives in the worker's thread; only its end may come from another.
            self._base = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            for pragma in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", "cache_size=-16384"):
                self._base.execute(f"PRAGMA {pragma}")
            self._base.execute("CREATE TABLE entry (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
        except (OSError, sqlite3.Error) as error:
            raise self._failed("cannot be made", error) from error

    def __len__(self) -> int:
        """Committed entries; costs a pass over the keys."""
        return self._number("SELECT count(*) FROM entry")

    def nbytes(self) -> int:
        """Bytes of committed keys and values; costs a pass over all of them."""
        return self._number("SELECT coalesce(sum(length(key) + length(value)), 0) FROM entry")

    def close(self) -> None:
        """Forget everything and remove the file."""
        self.abort()
        self._base.close()
        self._path.unlink(missing_ok=True)

    def _read(self, key: bytes) -> bytes | None:
        found = self._all("SELECT value FROM entry WHERE key = ?", key)
        return found[0][0] if found else None

    def _range(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Page by page; a commit in between ends it with an error, as a dictionary's would."""
        version, low, order = self._version, prefix, ">="
        end = _after(prefix)
        below, bound = ("", ()) if end is None else (" AND key < ?", (end,))
        while True:
            query = f"SELECT key, value FROM entry WHERE key {order} ?{below} ORDER BY key LIMIT {_PAGE}"
            page = self._all(query, low, *bound)
            for key, value in page:
                if self._version != version:
                    raise RuntimeError(f"the store {self._path.name} changed during a scan")
                yield key, value
            if len(page) < _PAGE:
                return
            low, order = page[-1][0], ">"

    def _fold(self, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        self._version += 1
        try:
            self._base.execute("BEGIN")
            for key, value in changes:
                if value is None:
                    self._base.execute("DELETE FROM entry WHERE key = ?", (key,))
                else:
                    self._base.execute("REPLACE INTO entry VALUES (?, ?)", (key, value))
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failed("cannot be written", error) from error

    def _number(self, query: str) -> int:
        return int(self._all(query)[0][0])

    def _all(self, query: str, *values: bytes) -> list[Any]:
        try:
            return self._base.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._failed("cannot be read", error) from error

    def _failed(self, what: str, error: Exception) -> StoreFile:
        return StoreFile(
            f"the state file {self._path} {what}: {error}. Free or grant what is missing (runtime.folder names the "
            "place); nothing is lost: the state is restored from its changelog at the next start"
        )


def _after(prefix: bytes) -> bytes | None:
    """The first key behind all that start with ``prefix``; None when there is no such bound."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else None
