"""Keyed state of a task in memory: a committed map under an overlay of uncommitted writes, kept in a changelog.

``put`` and ``delete`` write to the overlay; ``changes`` are what a transaction's changelog records must say; after the
commit they are folded into the committed map, after an abort they vanish. A mark allows the writes of one call to be
taken back, so that a failing call leaves nothing half done.
"""

from collections.abc import Iterable, Iterator

from headrace.schemas.errors import InvalidRecord

__all__ = ("MAX_VALUE_BYTES", "MemoryStore", "StoreView")

MAX_VALUE_BYTES = (8 << 20) - (64 << 10)
"""Largest value of a key: it has to fit into one changelog record."""


class _Absent:
    """Marks a key that has no entry in the overlay."""


_ABSENT = _Absent()


class MemoryStore:
    """All entries of one changelog partition; keys start with one byte that names the kind of entry."""

    def __init__(self) -> None:
        self._committed: dict[bytes, bytes] = {}
        self._overlay: dict[bytes, bytes | None] = {}
        self._undo: list[tuple[bytes, bytes | _Absent | None]] = []

    def __len__(self) -> int:
        return len(self._committed)

    @property
    def dirty(self) -> bool:
        """True when there are uncommitted writes."""
        return bool(self._overlay)

    def get(self, key: bytes) -> bytes | None:
        """The newest value of a key, uncommitted writes included."""
        if key in self._overlay:
            return self._overlay[key]
        return self._committed.get(key)

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
        """Entries whose key starts with ``prefix``, in byte order, over a snapshot; costs a pass over all keys."""
        found = {k: v for k, v in self._committed.items() if k.startswith(prefix)}
        for key, value in self._overlay.items():
            if key.startswith(prefix):
                if value is None:
                    found.pop(key, None)
                else:
                    found[key] = value
        return iter(sorted(found.items()))

    def mark(self) -> None:
        """Start a call whose writes ``undo`` takes back."""
        self._undo.clear()

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
        return [(k, v) for k, v in self._overlay.items() if v is not None or k in self._committed]

    def commit(self) -> None:
        """Fold the overlay into the committed map."""
        for key, value in self._overlay.items():
            if value is None:
                self._committed.pop(key, None)
            else:
                self._committed[key] = value
        self.abort()

    def abort(self) -> None:
        """Forget the overlay."""
        self._overlay.clear()
        self._undo.clear()

    def restore(self, entries: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        """Fold changelog records, in their order, into the committed map; a None value removes its key."""
        for key, value in entries:
            if key is None:
                continue
            if value is None:
                self._committed.pop(key, None)
            else:
                self._committed[key] = value


class StoreView:
    """The part of a store under a prefix, as a stage sees it (stage.Store)."""

    def __init__(self, store: MemoryStore, prefix: bytes) -> None:
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
        """Keys with the prefix in byte order with their values, over a snapshot taken at the call."""
        cut = len(self._prefix)
        return ((key[cut:], value) for key, value in self._store.scan(self._prefix + prefix))
