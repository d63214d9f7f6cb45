"""Opens the store that a URL, a path or a ``[store]`` section names.

Goes in: ``s3://bucket/prefix``, ``file:///folder``, a path, or the run's settings; comes out: an ``ObjectStore``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.store import ObjectStore, StoreRefused

if TYPE_CHECKING:
    from headrace.schemas.config import StoreConfig

__all__ = ("open_store",)


def open_store(
    where: "str | Path | StoreConfig", run_folder: Path | str | None = None, *, durable: bool = False
) -> ObjectStore:
    """Open a store.

    where: a URL, a path, or ``[store]``; an empty URL in ``[store]`` means ``run_folder``/store. Credentials of an S3
    store come from the environment. durable: fsync every put of a local store. Raises StoreRefused for an unknown
    scheme, a URL without bucket or a folder that cannot be used.
    """
    if isinstance(where, (str, Path)):
        return _open(str(where), {}, durable)
    url = where.url
    if not url:
        if run_folder is None:
            raise StoreRefused("[store] url is empty and no run folder is given: set [store] url")
        url = str(Path(run_folder) / "store")
    options = {
        "endpoint_url": where.endpoint_url or None,
        "region": where.region or None,
        "path_style": where.path_style,
        "timeout": where.timeout_seconds,
        "attempts": where.retries,
    }
    return _open(url, options, durable)


def _open(text: str, options: Mapping[str, Any], durable: bool) -> ObjectStore:
    if "://" not in text:
        return LocalStore(text, durable=durable)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(unquote(parts.path), durable=durable)
    if parts.scheme != "s3" or not parts.netloc:
        raise StoreRefused(f"store {text!r} is not understood: give s3://bucket/prefix, file:///folder or a path")
    from headrace.connectors.stores.s3 import S3Store

    return S3Store(parts.netloc, parts.path, **options)
