"""Frames: the change of a run of elements in the fewest bytes, each frame decodable on its own.

Goes in: old and new bits of a segment; comes out: frames in the mode that is smallest, and their exact inverse. A frame
that is damaged in any way raises DeltaCorrupt before the target is touched, with memory bounded by the target.

A frame, to the byte: mode (1 byte), element width in bytes (1 byte), elements, changed elements, then for every stream
of the mode its length and its stored length x 2 + 1 if it is a zstd frame, x 2 if it is stored as it is; numbers are
LEB128 of at most 5 bytes. The stored streams follow in order and end the frame. Values are little-endian.

=========  ====  ==========================================  ================================================
mode       byte  streams                                     apply
=========  ====  ==========================================  ================================================
steps      1     gaps, codes, magnitudes, escapes            once, on the base it was made for (width 2 only)
absolute   2     gaps, then a plane per byte of the element  any number of times
dense      3     a plane per byte of the element             any number of times, on any base
context    4     the streams of steps for each of 16 classes once, on the base it was made for (width 2 only)
=========  ====  ==========================================  ================================================

``delta_steps`` documents gaps, codes, magnitudes and escapes, ``delta_context`` the classes. Plane k holds byte k of
every value. In a context frame the changed elements of each class follow those of the frame, before the lengths.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from headrace.schemas.delta_context import apply_classes, steps_by_class
from headrace.schemas.delta_layout import DeltaCorrupt, Piece
from headrace.schemas.delta_steps import (
    CLASSES,
    I64,
    U8,
    Kernels,
    Seen,
    Steps,
    changed_positions,
    check_gaps,
    check_steps,
    gaps_of,
    positions_of,
    unseen,
)

__all__ = (
    "ABSOLUTE",
    "CODEC",
    "CONTEXT",
    "DENSE",
    "STEPS",
    "Frame",
    "apply_frame",
    "encode_absolute",
    "encode_context",
    "encode_dense",
    "encode_segment",
    "encode_steps",
    "frame_mode",
)

CODEC = "headrace-delta/1"
STEPS, ABSOLUTE, DENSE, CONTEXT = 1, 2, 3, 4
_ZSTD_LEVEL = 1
_SPARSE = 0.25
_GROUP = 64 << 10
_CONTEXT_ABOVE = 4096
_LONGEST_NUMBER = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded run: elements ``start`` to ``start + count`` of a segment, and the frame's bytes."""

    start: int
    count: int
    payload: bytes


class _Zstd(threading.local):
    """A compressor and a decompressor a thread: sharing one between threads crashes the process."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def encode_steps(steps: Steps, count: int) -> bytes:
    """The frame of mode steps for a run of ``count`` elements of width 2."""
    return _pack(STEPS, 2, count, steps.changed, (steps.gaps, steps.codes, steps.magnitudes, steps.escapes))


def encode_absolute(old: NDArray[Any], new: NDArray[Any]) -> bytes:
    """The frame of mode absolute: positions and new values (unsigned integers of any width, [count])."""
    positions = changed_positions(old, new)
    planes = _planes(new[positions])
    return _pack(ABSOLUTE, new.dtype.itemsize, new.size, positions.size, (gaps_of(positions), *planes))


def encode_dense(new: NDArray[Any]) -> bytes:
    """The frame of mode dense: every new value (unsigned integers of any width, [count])."""
    return _pack(DENSE, new.dtype.itemsize, new.size, new.size, _planes(new))


def encode_context(parts: Sequence[Steps], count: int) -> bytes:
    """The frame of mode context for a run of ``count`` elements: the steps of every class (``steps_by_class``)."""
    streams = [stream for part in parts for stream in (part.gaps, part.codes, part.magnitudes, part.escapes)]
    changes = [part.changed for part in parts]
    return _pack(CONTEXT, 2, count, sum(changes), streams, changes)


def encode_segment(
    old: NDArray[Any], new: NDArray[Any], pieces: Sequence[Piece], kernels: Kernels, *, context: bool = False
) -> tuple[list[Frame], list[int]]:
    """The frames that turn ``old`` into ``new`` and the changed elements of every piece.

    old, new: unsigned integers of the segment's width, [count]. No frames when nothing changed. Where at most a
    quarter of every tensor moved the segment is one frame of steps; otherwise tensors (small ones together) get frames
    of their own, each in the mode that makes it smallest. context: take that mode in place of one frame of
    many steps.
    """
    bounds = np.array([0, *(piece.stop for piece in pieces)], np.int64)
    if pieces:
        bounds[-1] = new.size
    if new.dtype.itemsize == 2 and pieces:
        payload, counts = _one_frame(old, new, bounds, kernels, context)
        if payload:
            return [Frame(0, new.size, payload)], counts.tolist()
    else:
        counts = np.diff(np.searchsorted(changed_positions(old, new), bounds)).astype(np.int64)
    frames: list[Frame] = []
    for lo, hi in _groups(bounds):
        if counts[lo:hi].any():
            start, stop = int(bounds[lo]), int(bounds[hi])
            frames.append(Frame(start, stop - start, _smallest(old[start:stop], new[start:stop], kernels)))
    return frames, counts.tolist()


def frame_mode(payload: bytes | memoryview) -> int:
    """The mode byte of a frame (0 when it is empty)."""
    return payload[0] if len(payload) else 0


def apply_frame(payload: bytes | memoryview, target: NDArray[Any], kernels: Kernels, seen: Seen = unseen) -> int:
    """Apply a frame in place to [count] unsigned integers of its width; returns the changed elements.

    seen: called with every part of the target, in order, as soon as it has its new values.
    Raises DeltaCorrupt, with the target untouched, unless every length, stream and position fits the target.
    """
    mode, changes, streams = _unpack(memoryview(payload), target.dtype.itemsize, target.size)
    changed = sum(changes)
    if mode == STEPS:
        steps = _steps(changed, streams)
        check_steps(steps, target.size)
        kernels.apply(steps, target, seen)
        return changed
    if mode == CONTEXT:
        apply_classes([_steps(n, streams[4 * i :]) for i, n in enumerate(changes)], target, kernels)
    elif mode == ABSOLUTE:
        check_gaps(streams[0], changed, target.size)
        target[positions_of(streams[0])] = _joined(streams[1:], target.dtype)
    else:
        target[:] = _joined(streams, target.dtype)
    seen(target)
    return changed


def _one_frame(old: NDArray[Any], new: NDArray[Any], bounds: I64, kernels: Kernels, context: bool) -> tuple[bytes, I64]:
    """The frame of all parts and the changed elements of each; empty when nothing or too much of one part changed."""
    if context:
        parts, positions = steps_by_class(old, new, kernels)
        counts = np.diff(np.searchsorted(positions, bounds)).astype(np.int64)
        if positions.size >= _CONTEXT_ABOVE and _sparse(bounds, counts):
            return encode_context(parts, new.size), counts
    steps, counts = kernels.scan(old, new, bounds)
    return (encode_steps(steps, new.size) if steps.changed and _sparse(bounds, counts) else b""), counts


def _sparse(bounds: I64, counts: I64) -> bool:
    """Whether at most a quarter of every tensor moved."""
    return all(counts[lo:hi].sum() <= _SPARSE * _size(bounds, lo, hi) for lo, hi in _groups(bounds))


def _size(bounds: I64, lo: int, hi: int) -> int:
    return int(bounds[hi] - bounds[lo])


def _groups(bounds: I64) -> list[tuple[int, int]]:
    """Runs of parts to be coded together: a part of at least 64 Ki elements alone, smaller neighbours up to that."""
    groups: list[tuple[int, int]] = []
    for part in range(bounds.size - 1):
        alone = _size(bounds, part, part + 1) >= _GROUP
        if groups and not alone and _size(bounds, groups[-1][0], part) < _GROUP:
            groups[-1] = (groups[-1][0], part + 1)
        else:
            groups.append((part, part + 1))
    return groups


def _smallest(old: NDArray[Any], new: NDArray[Any], kernels: Kernels) -> bytes:
    candidates = [encode_dense(new)]
    if new.dtype.itemsize == 2:
        steps, _ = kernels.scan(old, new, np.array([0, new.size], np.int64))
        candidates.append(encode_steps(steps, new.size))
        if steps.escapes.size * 4 >= steps.changed:
            candidates.append(encode_absolute(old, new))
    else:
        candidates.append(encode_absolute(old, new))
    return min(candidates, key=len)


def _planes(values: NDArray[Any]) -> list[U8]:
    width = values.dtype.itemsize
    octets = np.ascontiguousarray(values).view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(octets[:, place]) for place in range(width)]


def _joined(planes: Sequence[U8], dtype: np.dtype[Any]) -> NDArray[Any]:
    octets = np.empty((planes[0].size, len(planes)), np.uint8)
    for place, plane in enumerate(planes):
        octets[:, place] = plane
    return octets.reshape(-1).view(dtype)


def _number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_number(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_NUMBER):
        if at + place >= len(data):
            break
        octet = data[at + place]
        value |= (octet & 0x7F) << (7 * place)
        if octet < 0x80:
            return value, at + place + 1
    raise DeltaCorrupt(f"frame of {len(data)} bytes: a length at byte {at} does not end")


def _steps(changed: int, streams: Sequence[U8]) -> Steps:
    gaps, codes, magnitudes, escapes = streams[:4]
    return Steps(changed, gaps, codes, magnitudes, escapes.view("<u2"))


def _pack(
    mode: int, width: int, count: int, changed: int, streams: Sequence[NDArray[Any]], changes: Sequence[int] = ()
) -> bytes:
    head = [bytes((mode, width)), _number(count), _number(changed), *map(_number, changes)]
    bodies: list[bytes] = []
    for stream in streams:
        raw = np.ascontiguousarray(stream).view(np.uint8)
        body = _zstd.compressor.compress(raw.data) if raw.size else b""
        smaller = 0 < len(body) < raw.size
        bodies.append(body if smaller else raw.tobytes())
        head.append(_number(raw.size) + _number(len(bodies[-1]) * 2 + smaller))
    return b"".join((*head, *bodies))


def _unpack(data: memoryview, width: int, count: int) -> tuple[int, list[int], list[U8]]:
    """Mode, changed elements (by class) and raw streams; no length is allocated before the target has room for it."""
    if len(data) < 2 or data[0] not in (STEPS, ABSOLUTE, DENSE, CONTEXT):
        raise DeltaCorrupt(f"frame of {len(data)} bytes has mode {frame_mode(data)}; this release reads {CODEC}")
    mode = data[0]
    says_count, at = _read_number(data, 2)
    changed, at = _read_number(data, at)
    if data[1] != width or says_count != count or changed > count or (mode in (STEPS, CONTEXT) and width != 2):
        raise DeltaCorrupt(
            f"frame is for {says_count} elements of {data[1]} bytes, {changed} changed; here are {count} of {width}"
        )
    changes = [changed]
    if mode == CONTEXT:
        changes = []
        for _ in range(CLASSES):
            one, at = _read_number(data, at)
            changes.append(one)
        if sum(changes) != changed:
            raise DeltaCorrupt(f"classes of a frame have {sum(changes)} changes of {changed}")
    table: list[tuple[int, int, bool]] = []
    for number, (most, exact) in enumerate(_stream_bounds(mode, width, count, changes)):
        length, at = _read_number(data, at)
        stored, at = _read_number(data, at)
        table.append((length, stored >> 1, bool(stored & 1)))
        if length > most or (exact and length != most):
            raise DeltaCorrupt(f"stream {number} of {length} bytes where {most} are possible")
    if at + sum(stored for _, stored, _ in table) != len(data):
        raise DeltaCorrupt(f"frame of {len(data)} bytes is not as long as its streams")
    streams: list[U8] = []
    for length, stored, packed in table:
        streams.append(_stream(data[at : at + stored], length, packed))
        at += stored
    if mode in (STEPS, CONTEXT) and any(escapes.size % 2 for escapes in streams[3::4]):
        raise DeltaCorrupt("escape stream ends in half a value")
    return mode, changes, streams


def _stream_bounds(mode: int, width: int, count: int, changes: Sequence[int]) -> list[tuple[int, bool]]:
    """For each stream of a mode the most bytes it can have, and whether it must have exactly those."""
    if mode == DENSE:
        return [(count, True)] * width
    if mode == ABSOLUTE:
        return [(changes[0] + count // 255, False)] + [(changes[0], True)] * width
    sizes = [(n + count // 255, (n + 3) // 4, n, 2 * n) for n in changes]
    return [(most, False) for four in sizes for most in four]


def _stream(body: memoryview, length: int, packed: bool) -> U8:
    if not packed:
        if len(body) != length:
            raise DeltaCorrupt(f"stream of {length} bytes is stored in {len(body)}")
        return np.frombuffer(body, np.uint8)
    try:
        if zstandard.frame_content_size(body) != length:
            raise DeltaCorrupt(f"zstd frame is not of {length} bytes")
        raw = _zstd.decompressor.decompress(body, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaCorrupt(f"zstd frame cannot be read: {error}") from error
    return np.frombuffer(raw, np.uint8)
