"""The lane digest covers content and order."""

from __future__ import annotations

import xxhash

from headrace.schemas.digests import lane_digest


def test_it_is_xxh3_128_over_the_concatenated_bodies_whatever_schema_ids_stand_before_them() -> None:
    bodies = [b"one", b"", b"three"]
    values = [b"\0\0\0\0\7" + body for body in bodies]
    assert lane_digest(values) == xxhash.xxh3_128_hexdigest(b"".join(bodies))
    assert lane_digest([b"\0ABCD" + body for body in bodies]) == lane_digest(values)
    assert lane_digest([b"\0ABCD" + body + b"!" for body in bodies]) != lane_digest(values)
    assert lane_digest(iter(values)) == lane_digest(values)
    assert lane_digest(reversed(values)) != lane_digest(values)
    assert lane_digest(values[:2]) != lane_digest(values)
