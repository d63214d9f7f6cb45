"""Create-only puts on a store that ignores conditions, for a writer that something else fences (Kafka's transactions).

Goes in: a store and a check that fails once another writer has taken over; comes out: a store whose create-only puts
ask first, then check, then write. A writer that is stopped between check and write can still overwrite what its
successor wrote; ``mend`` puts that back, and readers never take one for the other, because manifests name their
parents by sha256.
"""

from collections.abc import Callable, Iterator

from headrace.connectors.stores.store import AlreadyExists, NoSuchKey, ObjectInfo, ObjectStore, exists

__all__ = ("FencedStore",)


class FencedStore:
    """``inner`` with create-only puts by question; every other call goes through.

    check: raises when this writer has been replaced; called right before each such put.
    """

    def __init__(self, inner: ObjectStore, check: Callable[[], None]) -> None:
        self._inner, self._check = inner, check

    @property
    def url(self) -> str:
        """See ``ObjectStore``."""
        return self._inner.url

    def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        """See ``ObjectStore``; also raises what ``check`` raises."""
        if create_only:
            if exists(self._inner, key):
                raise AlreadyExists(f"{self.url}: object {key} exists; a create-only put lost")
            self._check()
        self._inner.put(key, data)

    def mend(self, key: str, data: bytes) -> None:
        """Put back an object of this writer's that a replaced one has overwritten since."""
        try:
            if self._inner.get(key) == data:
                return
        except NoSuchKey:
            pass
        self._check()
        self._inner.put(key, data)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """See ``ObjectStore``."""
        return self._inner.get(key, start, end)

    def head(self, key: str) -> ObjectInfo:
        """See ``ObjectStore``."""
        return self._inner.head(key)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See ``ObjectStore``."""
        return self._inner.list(prefix, start_after)

    def delete(self, key: str) -> None:
        """See ``ObjectStore``."""
        self._inner.delete(key)

    def sweep_unfinished(self, prefix: str, before: float) -> int:
        """See ``ObjectStore``."""
        return self._inner.sweep_unfinished(prefix, before)
