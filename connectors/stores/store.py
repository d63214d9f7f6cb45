"""The object store as the rest of headrace sees it: a small Protocol, its errors and the rule for keys.

Goes in: keys and bytes; comes out: bytes and listings. The guarantee is the one the weights path stands on: a ``put``
with ``create_only`` has exactly one winner among any number of racing writers, and an object is never seen torn.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headrace.schemas.errors import ConfigurationError, HeadraceError

__all__ = (
    "AlreadyExists",
    "NoSuchKey",
    "ObjectInfo",
    "ObjectStore",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "UnsafeKey",
    "check_key",
    "check_prefix",
    "exists",
    "is_key",
)


class StoreError(HeadraceError):
    """Root of every error of an object store."""


class NoSuchKey(StoreError):
    """The object asked for is not there."""


class AlreadyExists(StoreError):
    """A create-only put lost: the key holds an object (another writer's, or the writer's own earlier attempt)."""


class StoreUnavailable(StoreError):
    """The store cannot serve just now (unreachable, time-out, throttled, disk full); the same call may be repeated."""


class StoreRefused(StoreError, ConfigurationError):
    """The store will not serve until a person changes something (no bucket, bad credentials, no conditional writes)."""


class UnsafeKey(StoreError, ValueError):
    """A key that could leave its root or that stores spell differently; never retried."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing tells of one object.

    key: the whole key. size: bytes. modified: seconds since the epoch, by the store's clock.
    """

    key: str
    size: int
    modified: float


@runtime_checkable
class ObjectStore(Protocol):
    """A flat space of immutable or overwritten objects; every method may be called from several threads at once.

    Every method raises StoreUnavailable (repeat the call), StoreRefused (a person has to act) or UnsafeKey.
    """

    @property
    def url(self) -> str:
        """Where the store is, for messages; never holds a secret."""
        ...

    def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        """Write a whole object atomically; with ``create_only`` raise AlreadyExists if the key holds an object."""
        ...

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes ``start`` (0) to ``end`` (the end, exclusive) of an object; shorter where the object ends before.

        Raises NoSuchKey.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and time of an object. Raises NoSuchKey."""
        ...

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key begins with ``prefix`` and sorts after ``start_after``, in the order of their keys.

        What has a name that is no key (``check_key``) is none of ours, and left out.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; removing what is not there is no error."""
        ...

    def sweep_unfinished(self, prefix: str, before: float) -> int:
        """Remove what uploads begun before a time (seconds since the epoch) left of objects under ``prefix``.

        Multipart uploads that nobody completed, temporary files of killed writers; returns how many.
        """
        ...


_PART = re.compile(r"[A-Za-z0-9_=+@~-][A-Za-z0-9._=+@~-]*")
_LONGEST_KEY = 900


def check_key(key: str) -> str:
    """Return ``key`` or raise UnsafeKey.

    A key is parts joined by '/', each of ``A-Z a-z 0-9 . _ = + @ ~ -`` and not beginning with '.', 900 characters
    at most: what every S3 store and every POSIX file system spells alike, and what cannot leave a folder.

    >>> check_key("runs/first/policy/manifest/000000000001.json")
    'runs/first/policy/manifest/000000000001.json'
    """
    if not is_key(key):
        raise UnsafeKey(
            f"object key {key[:200]!r} is refused: use parts of A-Z a-z 0-9 . _ = + @ ~ - joined by '/', "
            f"none empty or beginning with '.', at most {_LONGEST_KEY} characters"
        )
    return key


def is_key(text: str) -> bool:
    """Whether ``text`` is a key (see ``check_key``).

    >>> is_key("runs/first"), is_key("runs/copy of first"), is_key("runs/../first")
    (True, False, False)
    """
    return len(text) <= _LONGEST_KEY and all(_PART.fullmatch(part) and len(part) <= 200 for part in text.split("/"))


def check_prefix(prefix: str) -> str:
    """Return a listing's prefix or raise UnsafeKey: empty, a key, or a key with '/' at its end."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def exists(store: ObjectStore, key: str) -> bool:
    """Whether the key holds an object."""
    try:
        store.head(key)
    except NoSuchKey:
        return False
    return True
