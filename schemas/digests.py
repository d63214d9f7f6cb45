"""Digests of what lies in topics: the one function that writer and reader of a lane share (protocol 2, 8).

``batch`` puts the digest of every lane into the Manifest, a trainer computes it again over the values it read; a
difference means that items are missing, repeated, reordered or changed.
"""

from collections.abc import Iterable

import xxhash

__all__ = ("lane_digest",)


def lane_digest(values: Iterable[bytes]) -> str:
    """xxh3-128 (32 hex digits) over the concatenated encoded Item values of one lane of one batch, in lane order.

    >>> lane_digest([b"ab", b"c"]) == lane_digest([b"abc"])
    True
    >>> lane_digest([])
    '99aa06d3014798d86001c324468d497f'
    """
    digest = xxhash.xxh3_128()
    for value in values:
        digest.update(value)
    return digest.hexdigest()
