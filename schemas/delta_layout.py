"""Where every weight of a policy lies: the layout table that publisher and readers share.

Goes in: names, dtypes and shapes in the order of the model; comes out: a flat image of bytes cut into segments, and a
digest that names the table. Two sides with equal digests agree on the meaning of every byte of an image.

An image is the raw bits of all tensors, little-endian, each tensor beginning at a multiple of 64 bytes. Tensors with
elements of the same width lie together (widths in the order of their first tensor, tensors in the order given), so a
segment holds elements of one width only. Segments are cut every ``segment_bytes`` (8 MiB) from the start of a width's
part; gaps between tensors are zero and belong to the segment.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import HeadraceError

__all__ = (
    "SEGMENT_BYTES",
    "DeltaCorrupt",
    "DeltaError",
    "Layout",
    "LayoutMismatch",
    "Piece",
    "Segment",
    "Tensor",
)

SEGMENT_BYTES = 8 << 20
_FORMAT = "headrace-layout/1"
_ALIGN = 64
_LARGEST_TABLE = 64 << 20
_LARGEST_SEGMENT = 1 << 31
"""Bytes. Objects count the elements of a segment and the bytes of a frame in 32 bits."""
_LARGEST_NUMBER = 1 << 62
_VIEWS: dict[str, str] = {
    "bfloat16": "<u2",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "float8_e4m3fn": "|u1",
    "float8_e5m2": "|u1",
    "uint8": "|u1",
    "int8": "|i1",
    "bool": "|b1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
}


class DeltaError(HeadraceError):
    """Root of every error of the weights path that is not the store's."""


class DeltaCorrupt(DeltaError):
    """Bytes that are not what their digest, their format or their layout says; nothing was applied."""


class LayoutMismatch(DeltaError):
    """Weights that do not fit the layout: a missing or added tensor, another shape or another element width."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: checkpoint name, dtype by its torch name, shape, and the byte offset in the image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def width(self) -> int:
        """Bytes an element."""
        return np.dtype(_VIEWS[self.dtype]).itemsize

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous part of the image with elements of one width; offset and nbytes in bytes."""

    index: int
    offset: int
    nbytes: int
    width: int

    @property
    def count(self) -> int:
        """Elements, alignment gaps included."""
        return self.nbytes // self.width


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a tensor that lies in a segment: elements ``start`` to ``stop`` of the segment."""

    tensor: int
    start: int
    stop: int


class Layout:
    """The layout table; equal tables have equal ``digest`` (32 hex digits).

    tensors: in image order. segments: in image order. nbytes: size of the image.
    """

    def __init__(self, tensors: tuple[Tensor, ...], segments: tuple[Segment, ...]) -> None:
        self.tensors = tensors
        self.segments = segments
        self.nbytes = segments[-1].offset + segments[-1].nbytes if segments else 0

    @classmethod
    def of(
        cls,
        named_arrays: Mapping[str, NDArray[Any]],
        dtypes: Mapping[str, str],
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> Self:
        """The layout of weights given as raw bits.

        named_arrays: name -> array whose shape is the tensor's and whose item size is the dtype's width (uint16 for
        bfloat16). dtypes: name -> torch's name of the dtype. segment_bytes: a multiple of 64, at most 2 GiB. Raises
        LayoutMismatch.
        """
        if segment_bytes % _ALIGN or not 0 < segment_bytes <= _LARGEST_SEGMENT:
            raise LayoutMismatch(
                f"segment_bytes is {segment_bytes}: take a positive multiple of {_ALIGN}, at most {_LARGEST_SEGMENT}"
            )
        if set(named_arrays) != set(dtypes):
            odd = sorted(set(named_arrays) ^ set(dtypes))[:5]
            raise LayoutMismatch(f"arrays and dtypes name different tensors: {', '.join(odd)}")
        groups: dict[int, list[str]] = {}
        for name, array in named_arrays.items():
            if dtypes[name] not in _VIEWS:
                raise LayoutMismatch(f"tensor {name} has dtype {dtypes[name]!r}; known are {', '.join(_VIEWS)}")
            width = np.dtype(_VIEWS[dtypes[name]]).itemsize
            if array.dtype.itemsize != width:
                raise LayoutMismatch(
                    f"tensor {name} is {dtypes[name]} ({width} bytes an element) but comes as {array.dtype}"
                )
            groups.setdefault(width, []).append(name)
        tensors: list[Tensor] = []
        segments: list[Segment] = []
        offset = 0
        for width, names in groups.items():
            begin = offset
            for name in names:
                tensors.append(Tensor(name, dtypes[name], tuple(int(n) for n in named_arrays[name].shape), offset))
                offset += -(-named_arrays[name].size * width // _ALIGN) * _ALIGN
            for at in range(begin, offset, segment_bytes):
                segments.append(Segment(len(segments), at, min(segment_bytes, offset - at), width))
        return cls(tuple(tensors), tuple(segments))

    @cached_property
    def digest(self) -> str:
        """The first 32 hex digits of the sha256 of ``to_bytes()``."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:32]

    def to_bytes(self) -> bytes:
        """The table as canonical JSON (sorted keys, no spaces)."""
        table = {
            "format": _FORMAT,
            "tensors": [[t.name, t.dtype, list(t.shape), t.offset] for t in self.tensors],
            "segments": [[s.offset, s.nbytes, s.width] for s in self.segments],
        }
        return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a table back. Raises DeltaCorrupt unless it is whole and every tensor lies in segments of its width."""
        if len(data) > _LARGEST_TABLE:
            raise DeltaCorrupt(f"layout table of {len(data)} bytes: the limit is {_LARGEST_TABLE}")
        try:
            table = json.loads(data)
            if table["format"] != _FORMAT:
                raise DeltaCorrupt(f"layout format {str(table['format'])[:40]!r}: this release reads {_FORMAT}")
            tensors = tuple(Tensor(str(n), str(d), tuple(map(int, s)), int(o)) for n, d, s, o in table["tensors"])
            segments = tuple(Segment(i, int(o), int(n), int(w)) for i, (o, n, w) in enumerate(table["segments"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DeltaCorrupt(f"layout table cannot be read: {error}") from error
        _check(tensors, segments)
        return cls(tensors, segments)

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """For every segment the pieces of tensors in it, in order."""
        found: list[tuple[Piece, ...]] = []
        first = 0
        for segment in self.segments:
            here: list[Piece] = []
            end = segment.offset + segment.nbytes
            while first < len(self.tensors) and _end(self.tensors[first]) <= segment.offset:
                first += 1
            for number in range(first, len(self.tensors)):
                tensor = self.tensors[number]
                if tensor.offset >= end:
                    break
                start, stop = max(tensor.offset, segment.offset), min(_end(tensor), end)
                if stop > start:
                    w = segment.width
                    here.append(Piece(number, (start - segment.offset) // w, (stop - segment.offset) // w))
            found.append(tuple(here))
        return tuple(found)

    def image(self) -> NDArray[np.uint8]:
        """A new image of zeros: uint8 [nbytes]."""
        return np.zeros(self.nbytes, np.uint8)

    def fill(self, image: NDArray[np.uint8], weights: Mapping[str, NDArray[Any]]) -> None:
        """Copy weights (raw bits, name -> array of the tensor's shape and width) into an image.

        Raises LayoutMismatch, before anything is copied, when names, shapes or widths differ.
        """
        if len(weights) != len(self.tensors) or any(t.name not in weights for t in self.tensors):
            odd = sorted({t.name for t in self.tensors} ^ set(weights))[:5]
            raise LayoutMismatch(f"weights and layout {self.digest} name different tensors: {', '.join(odd)}")
        for tensor in self.tensors:
            array = weights[tensor.name]
            if tuple(array.shape) != tensor.shape or array.dtype.itemsize != tensor.width:
                raise LayoutMismatch(
                    f"tensor {tensor.name} is {tensor.dtype} {list(tensor.shape)} in the layout "
                    f"but comes as {array.dtype} {list(array.shape)}"
                )
        for tensor, view in zip(self.tensors, self._views(image), strict=True):
            np.copyto(view, weights[tensor.name].view(view.dtype))

    def views(self, image: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Name -> view into the image, shaped (uint16 for bfloat16, uint8 for float8, else the numpy dtype)."""
        return {tensor.name: view for tensor, view in zip(self.tensors, self._views(image), strict=True)}

    def elements(self, image: NDArray[np.uint8], segment: Segment) -> NDArray[Any]:
        """A segment of an image as unsigned integers of its width: [count], a view."""
        return image[segment.offset : segment.offset + segment.nbytes].view(f"<u{segment.width}")

    def _views(self, image: NDArray[np.uint8]) -> Iterator[NDArray[Any]]:
        if image.nbytes != self.nbytes:
            raise LayoutMismatch(f"image of {image.nbytes} bytes for a layout of {self.nbytes}")
        for tensor in self.tensors:
            part = image[tensor.offset : tensor.offset + tensor.size * tensor.width]
            yield part.view(_VIEWS[tensor.dtype]).reshape(tensor.shape)


def _end(tensor: Tensor) -> int:
    return tensor.offset + tensor.size * tensor.width


def _check(tensors: tuple[Tensor, ...], segments: tuple[Segment, ...]) -> None:
    """Raise DeltaCorrupt unless segments tile the image and tensors lie in it in order, in segments of their width."""
    at = 0
    for segment in segments:
        whole = segment.offset == at and 0 < segment.nbytes <= _LARGEST_SEGMENT and segment.nbytes % _ALIGN == 0
        if not whole or segment.width not in (1, 2, 4, 8):
            raise DeltaCorrupt(f"layout table: segment {segment.index} does not follow its predecessor")
        at += segment.nbytes
    widths = [(segment.offset, segment.offset + segment.nbytes, segment.width) for segment in segments]
    place, covered = 0, 0
    for tensor in tensors:
        known = tensor.dtype in _VIEWS and all(0 <= n < _LARGEST_NUMBER for n in tensor.shape)
        if not known or tensor.offset < covered or tensor.offset % _ALIGN or _end(tensor) > at:
            raise DeltaCorrupt(f"layout table: tensor {tensor.name[:80]!r} does not fit")
        covered = _end(tensor)
        while place < len(widths) and widths[place][1] <= tensor.offset:
            place += 1
        for begin, _, width in widths[place:]:
            if begin >= covered:
                break
            if width != tensor.width:
                raise DeltaCorrupt(f"layout table: tensor {tensor.name[:80]!r} lies in a segment of another width")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise DeltaCorrupt("layout table: a tensor is named twice")
