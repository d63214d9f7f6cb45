"""The lane digest covers content and order."""

from __future__ import annotations

import xxhash

from headrace.schemas.digests import lane_digest


def test_it_is_xxh3_128_over_the_concatenated_values() -> None:
    values = [b"one", b"", b"three"]
    assert lane_digest(values) == xxhash.xxh3_128_hexdigest(b"".join(values))
    assert lane_digest(iter(values)) == lane_digest(values)
    assert lane_digest(reversed(values)) != lane_digest(values)
    assert lane_digest(values[:2]) != lane_digest(values)
