"""Keyed state of a task: a committed map under an overlay of uncommitted writes, kept in a changelog.

``put`` and ``delete`` write to the overlay; ``changes`` are what a transaction's changelog records must say; after the
commit they are folded into the committed map, after an abort they vanish. A mark allows the writes of one call to be
taken back, so that a failing call leaves nothing half done. ``MemoryStore`` keeps the map in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from headrace.schemas.errors import InvalidRecord

__all__ = ("MAX_VALUE_BYTES", "MemoryStore", "OverlayStore", "StoreView")

MAX_VALUE_BYTES = (8 << 20) - (64 << 10)
"""Largest value of a key: it has to fit into one changelog record."""


class _Absent:
    """Marks a key that has no entry in the overlay."""


_ABSENT = _Absent()


class OverlayStore(ABC):
    """All entries of one changelog partition; keys start with one byte that names the kind of entry.

    A subclass keeps the committed map; nothing of it is called while a scan runs but ``get`` and reads.
    """

    def __init__(self) -> None:
        self._overlay: dict[bytes, bytes | None] = {}
        self._undo: list[tuple[bytes, bytes | _Absent | None]] = []
        self.mark: Callable[[], None] = self._undo.clear
        """Start a call whose writes ``undo`` takes back."""

    @abstractmethod
    def _read(self, key: bytes) -> bytes | None:
        """A committed value."""

    @abstractmethod
    def _range(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Committed entries whose key starts with ``prefix``, in byte order."""

    @abstractmethod
    def _fold(self, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Set and (None) remove committed entries, in order."""

    @abstractmethod
    def __len__(self) -> int:
        """Committed entries."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of committed keys and values; costs a pass over all of them."""

    @abstractmethod
    def close(self) -> None:
        """Forget everything and free what it took."""

    @property
    def dirty(self) -> bool:
        """True when there are uncommitted writes."""
        return bool(self._overlay)

    def get(self, key: bytes) -> bytes | None:
        """The newest value of a key, uncommitted writes included."""
        if key in self._overlay:
            return self._overlay[key]
        return self._read(key)

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key in the overlay. Raises InvalidRecord for a value that no changelog record can hold."""
        if len(key) + len(value) > MAX_VALUE_BYTES:
            raise InvalidRecord(
                f"a store entry of {len(value)} bytes (key {key[:64]!r}) is over the limit of {MAX_VALUE_BYTES}"
            )
        self._undo.append((key, self._overlay.get(key, _ABSENT)))
        self._overlay[key] = value

    def delete(self, key: bytes) -> None:
        """Remove a key in the overlay."""
        if self.get(key) is not None:
            self._undo.append((key, self._overlay.get(key, _ABSENT)))
            self._overlay[key] = None

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Entries whose key starts with ``prefix``, in byte order, as they are at this call."""
        over = sorted((k, v) for k, v in self._overlay.items() if k.startswith(prefix))
        return _merged(self._range(prefix), over) if over else self._range(prefix)

    def undo(self) -> None:
        """Take back every write since ``mark``."""
        for key, before in reversed(self._undo):
            if isinstance(before, _Absent):
                del self._overlay[key]
            else:
                self._overlay[key] = before
        self._undo.clear()

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """What the changelog must say of this transaction; None is a tombstone."""
        return [(k, v) for k, v in self._overlay.items() if v is not None or self._read(k) is not None]

    def commit(self) -> None:
        """Fold the overlay into the committed map."""
        self._fold(self._overlay.items())
        self.abort()

    def abort(self) -> None:
        """Forget the overlay."""
        self._overlay.clear()
        self._undo.clear()

    def restore(self, entries: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        """Fold changelog records, in their order, into the committed map; a None value removes its key."""
        self._fold((key, value) for key, value in entries if key is not None)

    def retain(self, keys: Container[bytes]) -> int:
        """Remove committed entries whose key is not among ``keys``; returns how many went."""
        gone = [key for key, _ in self._range(b"") if key not in keys]
        self._fold((key, None) for key in gone)
        return len(gone)


def _merged(
    committed: Iterator[tuple[bytes, bytes]], over: Sequence[tuple[bytes, bytes | None]]
) -> Iterator[tuple[bytes, bytes]]:
    """Two runs in key order as one; ``over`` wins, its None hides an entry."""
    entry = next(committed, None)
    for key, value in over:
        while entry is not None and entry[0] < key:
            yield entry
            entry = next(committed, None)
        if entry is not None and entry[0] == key:
            entry = next(committed, None)
        if value is not None:
            yield key, value
    if entry is not None:
        yield entry
        yield from committed


class MemoryStore(OverlayStore):
    """A store whose committed map is a dictionary; a scan costs a pass over all keys."""

    def __init__(self) -> None:
        super().__init__()
        self._committed: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        """Committed entries."""
        return len(self._committed)

    def nbytes(self) -> int:
        """Bytes of committed keys and values; costs a pass over all of them."""
        return sum(len(key) + len(value) for key, value in self._committed.items())

    def close(self) -> None:
        """Forget everything."""
        self.abort()
        self._committed.clear()

    def _read(self, key: bytes) -> bytes | None:
        return self._committed.get(key)

    def _range(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted((k, v) for k, v in self._committed.items() if k.startswith(prefix)))

    def _fold(self, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        committed = self._committed
        for key, value in changes:
            if value is None:
                committed.pop(key, None)
            else:
                committed[key] = value


class StoreView:
    """The part of a store under a prefix, as a stage sees it (stage.Store)."""

    def __init__(self, store: OverlayStore, prefix: bytes) -> None:
        self._store = store
        self._prefix = prefix

    def get(self, key: bytes) -> bytes | None:
        """The newest value of a key, uncommitted writes included."""
        return self._store.get(self._prefix + key)

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key within the current transaction. Raises InvalidRecord for a value over 8 MB."""
        self._store.put(self._prefix + key, value)

    def delete(self, key: bytes) -> None:
        """Remove a key within the current transaction."""
        self._store.delete(self._prefix + key)

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys with the prefix in byte order with their values, as they are at the call; ends with the stage's call."""
        cut = len(self._prefix)
        return ((key[cut:], value) for key, value in self._store.scan(self._prefix + prefix))
