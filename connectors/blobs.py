"""Large trajectories beside the topics: sequences go to the object store, a reference with a digest travels instead.

Goes in: sequences; comes out: a BlobRef, and from a BlobRef the sequences again, verified. An object is the encoded
``Partial`` record of its attempt, so any reader of the topics can read it.
"""

from collections.abc import Sequence

import xxhash

from headrace.connectors.stores.store import ObjectStore, StoreError
from headrace.schemas import parts
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.ids import blob_key
from headrace.schemas.parts import BlobRef
from headrace.schemas.records import Partial

__all__ = ("BlobCorrupt", "array_bytes", "get_sequences", "put_sequences")


class BlobCorrupt(StoreError):
    """An object is not what its reference says."""


def array_bytes(sequences: Sequence[parts.Sequence]) -> int:
    """Bytes that the arrays of sequences take in a record."""
    total = 0
    for sequence in sequences:
        total += 9 * sequence.tokens.size + 4 * sequence.versions.size
        total += sum(len(extra.data) for extra in sequence.extras.values())
    return total


def put_sequences(store: ObjectStore, run: str, holder: Partial) -> BlobRef:
    """Write the sequences of an attempt under ``blobs/{group}/{replica}/{attempt}`` and return the reference.

    Raises what the store's put raises, InvalidRecord for sequences that may not travel.
    """
    data = encode(holder)
    key = blob_key(run, holder.group, holder.replica, holder.attempt)
    store.put(key, data)
    return BlobRef(key=key, size=len(data), digest=xxhash.xxh3_128_hexdigest(data))


def get_sequences(store: ObjectStore, reference: BlobRef) -> list[parts.Sequence]:
    """The sequences behind a reference. Raises BlobCorrupt, and what the store's get raises."""
    data = store.get(reference.key)
    if len(data) != reference.size or xxhash.xxh3_128_hexdigest(data) != reference.digest:
        raise BlobCorrupt(
            f"{store.url}: object {reference.key} is not the one referred to ({len(data)} bytes, {reference.size} "
            "wanted): it was overwritten or damaged"
        )
    try:
        holder = decode(data)
    except UndecodableRecord as error:
        raise BlobCorrupt(f"{store.url}: object {reference.key}: {error}") from error
    if not isinstance(holder, Partial):
        raise BlobCorrupt(f"{store.url}: object {reference.key} holds a {type(holder).__name__}")
    return holder.sequences
