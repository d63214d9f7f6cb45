"""Opens the store that a URL or a ``[store]`` section names.

Goes in: ``s3://bucket/prefix``, ``file:///folder`` or a path, with options; comes out: an ``ObjectStore``.
"""

from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.store import ObjectStore, StoreRefused

__all__ = ("StoreSettings", "open_store")


class StoreSettings(Protocol):
    """What a ``[store]`` section gives; secrets are not among it, they come from the environment."""

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``, ``file:///folder`` or a path."""
        ...

    @property
    def endpoint_url(self) -> str | None:
        """The S3 server, when it is not AWS."""
        ...

    @property
    def region(self) -> str | None:
        """The S3 region."""
        ...

    @property
    def path_style(self) -> bool:
        """Bucket in the path instead of the host name."""
        ...


def open_store(
    where: str | Path | StoreSettings,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    path_style: bool = True,
    durable: bool = False,
) -> ObjectStore:
    """Open a store by URL, path or settings (which then stand for the keyword arguments).

    durable: fsync every put of a local store. Raises StoreRefused for an unknown scheme, a URL without bucket or a
    folder that cannot be used.
    """
    if not isinstance(where, (str, Path)):
        return open_store(
            where.url,
            endpoint_url=where.endpoint_url,
            region=where.region,
            path_style=where.path_style,
            durable=durable,
        )
    text = str(where)
    if "://" not in text:
        return LocalStore(text, durable=durable)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(unquote(parts.path), durable=durable)
    if parts.scheme != "s3" or not parts.netloc:
        raise StoreRefused(f"store {text!r} is not understood: give s3://bucket/prefix, file:///folder or a path")
    from headrace.connectors.stores.s3 import S3Store

    return S3Store(parts.netloc, parts.path, endpoint_url=endpoint_url, region=region, path_style=path_style)
