"""Digests of what lies in topics: the one function that writer and reader of a lane share (protocol 2, 8).

``batch`` puts the digest of every lane into the Manifest, a trainer computes it again over the values it read; a
difference means that items are missing, repeated, reordered or changed. The schema id in front of a value is left out:
a registry's takes its place on the way to the topic.
"""

from collections.abc import Iterable

import xxhash

from headrace.schemas.codec import FRAME_BYTES

__all__ = ("body_of", "lane_digest")


def body_of(value: bytes) -> memoryview:
    """The Avro body of an encoded record, without a copy."""
    return memoryview(value)[FRAME_BYTES:]


def lane_digest(values: Iterable[bytes]) -> str:
    """xxh3-128 (32 hex digits) over the joined bodies of the encoded Items of one lane of one batch, in lane order.

    >>> lane_digest([b"12345ab", b"abcdec"]) == lane_digest([b"fghijabc"])
    True
    >>> lane_digest([])
    '99aa06d3014798d86001c324468d497f'
    """
    digest = xxhash.xxh3_128()
    for value in values:
        digest.update(body_of(value))
    return digest.hexdigest()
