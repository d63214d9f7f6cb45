"""The binary object that one rank uploads for one version: a head with tables and digests, then frames.

Goes in: encoded segments; comes out: bytes, and back a checked head from which any frame can be fetched and verified
alone. The head's own digest stands in the manifest, so one sha256 chain covers every byte of every weight.

To the byte, little-endian; digests are xxh3-128 (16 bytes, canonical order):

* preamble, 64 bytes: magic ``HRWS`` | format u16 = 1 | kind u16 (0 full, 1 delta) | rank u32 | ranks u32 |
  segments u32 | frames u32 | version i64 | parent version i64 (-1: none) | layout digest 16 bytes |
  bytes of the whole object u64
* a row of 24 bytes for every segment that the object changes, by index: index u32 | frames u32 | digest of the new
  segment 16 bytes
* a row of 32 bytes for every frame, in the order of the segments: start u32 | count u32 (elements of the segment) |
  length u32 | reserved u32 = 0 | digest of the payload 16 bytes
* the payloads in the same order

A full object has every segment of its rank, each with frames that cover it; a delta object has the changed ones.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.schemas.delta_codec import Frame, apply_frame
from headrace.schemas.delta_layout import DeltaCorrupt, Layout
from headrace.schemas.delta_steps import Kernels

__all__ = (
    "DELTA",
    "FULL",
    "FrameRow",
    "SegmentFrames",
    "SegmentRow",
    "ShardHead",
    "apply_frames",
    "digest_of",
    "head_length",
    "pack_shard",
    "root_of",
    "unpack_head",
)

FULL, DELTA = 0, 1
_MAGIC, _FORMAT = b"HRWS", 1
_PREAMBLE = struct.Struct("<4sHHIIIIqq16sQ")
_SEGMENT = struct.Struct("<II16s")
_FRAME = struct.Struct("<IIII16s")


@dataclass(frozen=True, slots=True)
class SegmentFrames:
    """What a rank sends of one segment: its index, the digest of its new elements, its frames in order."""

    index: int
    digest: bytes
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True)
class FrameRow:
    """A frame's run of elements, its place in the object (bytes) and the digest of its payload."""

    start: int
    count: int
    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """A segment in an object: index, digest of the new elements, frames in order."""

    index: int
    digest: bytes
    frames: tuple[FrameRow, ...]


@dataclass(frozen=True, slots=True)
class ShardHead:
    """The checked head of an object."""

    kind: int
    rank: int
    ranks: int
    version: int
    parent: int
    nbytes: int
    segments: tuple[SegmentRow, ...]


def digest_of(data: bytes | memoryview | NDArray[Any]) -> bytes:
    """xxh3-128 of bytes or of a contiguous array, 16 bytes."""
    buffer = data.view(np.uint8).data if isinstance(data, np.ndarray) else data
    return xxhash.xxh3_128_digest(buffer)


def apply_frames(
    frames: Iterable[tuple[int, int, bytes | memoryview]], target: NDArray[Any], kernels: Kernels
) -> bytes:
    """Apply frames in place to the elements of a segment; the digest of all its new elements, 16 bytes.

    frames: first element, elements and payload of each, ascending and apart. Elements are digested right after they got
    their new values, which reads memory once instead of twice. Raises DeltaCorrupt as ``apply_frame`` does.
    """
    digest = xxhash.xxh3_128()

    def seen(run: NDArray[Any]) -> None:
        digest.update(run.view(np.uint8).data)

    done = 0
    for start, count, payload in frames:
        seen(target[done:start])
        done = start + count
        apply_frame(payload, target[start:done], kernels, seen)
    seen(target[done:])
    return digest.digest()


def root_of(segment_digests: Iterable[bytes]) -> str:
    """The digest of an image, from the digests of all its segments in order: 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(b"".join(segment_digests))


def pack_shard(
    kind: int,
    version: int,
    parent: int,
    layout: Layout,
    segments: Sequence[SegmentFrames],
    rank: int = 0,
    ranks: int = 1,
) -> tuple[bytes, int]:
    """The object's bytes and the length of its head. segments: by ascending index."""
    rows = [_SEGMENT.pack(segment.index, len(segment.frames), segment.digest) for segment in segments]
    frames = [frame for segment in segments for frame in segment.frames]
    rows += [_FRAME.pack(f.start, f.count, len(f.payload), 0, digest_of(f.payload)) for f in frames]
    head = _PREAMBLE.size + sum(map(len, rows))
    nbytes = head + sum(len(frame.payload) for frame in frames)
    preamble = _PREAMBLE.pack(
        _MAGIC, _FORMAT, kind, rank, ranks, len(segments), len(frames), version, parent,
        bytes.fromhex(layout.digest), nbytes,
    )  # fmt: skip
    return b"".join((preamble, *rows, *(frame.payload for frame in frames))), head


def head_length(preamble: bytes | memoryview) -> int:
    """The length of the head, from the first 64 bytes of an object. Raises DeltaCorrupt."""
    if len(preamble) < _PREAMBLE.size or bytes(preamble[:4]) != _MAGIC:
        raise DeltaCorrupt("not a weights object: it does not begin with HRWS")
    segments, frames = _PREAMBLE.unpack_from(preamble)[5:7]
    return _PREAMBLE.size + int(segments) * _SEGMENT.size + int(frames) * _FRAME.size


def unpack_head(data: bytes | memoryview, layout: Layout) -> ShardHead:
    """Read and check the head of an object against the layout; ``data`` may go on after the head.

    Raises DeltaCorrupt unless every row lies in the layout, in order, without overlap, and payloads tile the object.
    """
    head = head_length(data)
    fields = _PREAMBLE.unpack_from(data)
    _, form, kind, rank, ranks, nsegments, nframes, version, parent, digest, nbytes = fields
    if form != _FORMAT or kind not in (FULL, DELTA) or rank >= ranks:
        raise DeltaCorrupt(f"weights object of format {form}, kind {kind}, rank {rank} of {ranks}: not readable here")
    if digest.hex() != layout.digest:
        raise DeltaCorrupt(f"weights object has layout {digest.hex()}, expected {layout.digest}")
    if len(data) < head or nsegments > len(layout.segments):
        raise DeltaCorrupt(f"weights object ends in its head: {len(data)} of {head} bytes")
    at, left, last, offset = _PREAMBLE.size + nsegments * _SEGMENT.size, nframes, -1, head
    segments: list[SegmentRow] = []
    for index, count, new in _SEGMENT.iter_unpack(data[_PREAMBLE.size : at]):
        if not last < index < len(layout.segments) or count > left:
            raise DeltaCorrupt(f"weights object: segment {index} with {count} frames does not fit")
        rows, offset = _frames(data, at, count, offset, layout.segments[index].count, whole=kind == FULL)
        segments.append(SegmentRow(index, new, rows))
        at += count * _FRAME.size
        left, last = left - count, index
    if left or offset != nbytes:
        raise DeltaCorrupt(f"weights object of {nbytes} bytes: its frames end at {offset}, {left} belong to no segment")
    return ShardHead(kind, rank, ranks, version, parent, nbytes, tuple(segments))


def _frames(
    data: bytes | memoryview, at: int, number: int, offset: int, elements: int, *, whole: bool
) -> tuple[tuple[FrameRow, ...], int]:
    """The frames of one segment from its rows at ``at``, and where their payloads end."""
    rows: list[FrameRow] = []
    covered = 0
    for place in range(number):
        start, count, length, reserved, digest = _FRAME.unpack_from(data, at + place * _FRAME.size)
        gap = start != covered if whole else start < covered
        if gap or count == 0 or start + count > elements or reserved:
            raise DeltaCorrupt(f"weights object: a frame of elements {start} to {start + count} does not fit")
        rows.append(FrameRow(start, count, offset, length, digest))
        covered, offset = start + count, offset + length
    if not rows or (whole and covered != elements):
        raise DeltaCorrupt(f"weights object: frames cover {covered} of {elements} elements of a segment")
    return tuple(rows), offset
