"""Index and value, as plain as it gets: a second way to write the same change, for comparison only.

A tensor's change is a header of 16 bytes (magic, width of an index, elements, changes), the indices as uint32 (uint64
from 2^32 elements on) and the new bfloat16 values. Written after public descriptions of such formats; it shares no code
with the codec it is compared to. Nothing is checked, nothing is compressed.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

_HEADER = struct.Struct("<4sIII")
_MAGIC = b"RAWV"


def encode(old: NDArray[np.uint16], new: NDArray[np.uint16]) -> bytes:
    """The change of one tensor (flat)."""
    where = np.flatnonzero(old != new)
    width = 4 if old.size < 1 << 32 else 8
    index = where.astype(np.uint32 if width == 4 else np.uint64)
    return _HEADER.pack(_MAGIC, width, old.size & 0xFFFFFFFF, where.size) + index.tobytes() + new[where].tobytes()


def apply(data: bytes, target: NDArray[np.uint16]) -> None:
    """Write the new values into a tensor, in place."""
    magic, width, _, changes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("not an index + value change")
    index = np.frombuffer(data, np.uint32 if width == 4 else np.uint64, changes, _HEADER.size)
    target[index] = np.frombuffer(data, np.uint16, changes, _HEADER.size + width * changes)
