"""Damaged deltas by the thousand: what a reader does with objects that are cut, flipped, spliced or forged.

Half are damaged as they lie in a store, so that a digest is wrong. The other half are forged: their payload is damaged
and every digest of payload, head and manifest made anew, so that the decoder itself has to cope and only the digest of
the new weights is left to tell.
"""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.fault_kit import POLICY, RUN, FaultStore, advance, layout
from headrace.connectors.stores.chain import Chain, Hop, Link
from headrace.connectors.stores.image import Image, apply_hop, load_image
from headrace.connectors.stores.local import LocalStore
from headrace.schemas.delta_layout import DeltaError
from headrace.schemas.delta_manifest import WeightManifest
from headrace.schemas.delta_shard import digest_of, unpack_head

_ROWS_AT = 64


@dataclass
class Fuzz:
    """deltas: how many were tried. applied: built into an image although damaged. crashed: raised something else than a
    DeltaError. grown_mb: what the process grew by at its largest."""

    deltas: int = 0
    applied: int = 0
    crashed: int = 0
    grown_mb: float = 0.0


def damaged(whole: bytes, rng: np.random.Generator) -> bytes:
    """A damaged copy: a bit flipped, cut short, overwritten, bytes taken out or put in."""
    data, at = bytearray(whole), int(rng.integers(0, len(whole)))
    kind = int(rng.integers(0, 5))
    if kind == 0:
        data[at] ^= 1 << int(rng.integers(0, 8))
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at : at + 8] = rng.bytes(8)
    elif kind == 3:
        del data[at : at + int(rng.integers(1, 9))]
    else:
        data[at:at] = rng.bytes(int(rng.integers(1, 9)))
    return bytes(data)


def forged(whole: bytes, head_bytes: int, rng: np.random.Generator) -> tuple[bytes, int]:
    """An object with one payload damaged and all digests in its head right; and the length of its head."""
    head = unpack_head(whole, layout())
    frames = [frame for segment in head.segments for frame in segment.frames]
    chosen = int(rng.integers(0, len(frames)))
    payloads = [whole[frame.offset : frame.offset + frame.length] for frame in frames]
    payloads[chosen] = damaged(payloads[chosen], rng) or b"\0"
    rows = bytearray(whole[:head_bytes])
    at = _ROWS_AT + 24 * len(head.segments) + 32 * chosen
    struct.pack_into("<I", rows, at + 8, len(payloads[chosen]))
    rows[at + 16 : at + 32] = digest_of(payloads[chosen])
    body = b"".join(payloads)
    struct.pack_into("<Q", rows, _ROWS_AT - 8, len(rows) + len(body))
    return bytes(rows) + body, head_bytes


def _trials(whole: bytes, manifest: WeightManifest, count: int) -> Iterator[tuple[bytes, WeightManifest]]:
    rng = np.random.default_rng(17)
    ref = manifest.delta[0]
    for number in range(count):
        if number % 2:
            data, head = forged(whole, ref.head, rng)
            mine = replace(ref, nbytes=len(data), head=head, digest=digest_of(data[:head]).hex())
            yield data, replace(manifest, delta=(mine,))
        else:
            yield damaged(whole, rng), manifest


def fuzz(folder: Path, count: int) -> Fuzz:
    """Try ``count`` damaged deltas on a small model."""
    store = LocalStore(folder)
    advance(store, 2)
    hurt = FaultStore(store)
    chain = Chain(hurt, RUN, POLICY)
    base: Image = load_image(chain, 0)
    right = load_image(chain, 1, base).data
    manifest = chain.link(1).manifest
    whole = store.get(manifest.delta[0].key)
    found = Fuzz()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data, other in _trials(whole, manifest, count):
        if data == whole:
            continue
        found.deltas += 1
        hurt.damage = lambda key, body, data=data: data if key.endswith(".bin") else body  # type: ignore[misc]
        try:
            image = apply_hop(chain, Hop.delta(Link(other, other.to_bytes()[1])), base)
            found.applied += not np.array_equal(image.data, right)
        except DeltaError:
            continue
        except (ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError, struct.error) as error:
            found.crashed += 1
            print(f"fuzz: {type(error).__name__}: {error}")
    found.grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return found
