"""The change of 16-bit floats as gaps and ULP steps, in numpy: the streams of the step mode and their inverse.

Goes in: old and new bits of the same elements; comes out: four byte streams that say which elements moved and by how
many units in the last place. Works on bits alone, so NaN payloads, infinities, -0.0 and denormals travel exactly. The
kernels of ``delta_fast`` give the same bytes.

Streams: ``gaps`` has a byte per changed element, the number of unchanged ones before it, with a byte 255 for every
full 255. ``codes`` has 2 bits per changed element, four to a byte, lowest bits first: bit 0 = downwards, bit 1 = by
more than one step; unused bits are 0. ``magnitudes`` has a byte per element with bit 1: steps - 2, or 255 when that
does not fit. ``escapes`` has the new bits of those last ones. A step is the difference of the bits read as a
sign-magnitude integer, with -0 one below +0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.delta_layout import DeltaCorrupt

__all__ = (
    "CLASSES",
    "CLASS_TABLE",
    "Kernels",
    "NumpyKernels",
    "Seen",
    "Steps",
    "changed_positions",
    "check_gaps",
    "check_steps",
    "classes_of",
    "gaps_of",
    "kernels_for",
    "moved",
    "no_such_rank",
    "ordered",
    "positions_of",
    "steps_of",
    "unseen",
)

_CHUNK = 1 << 20
_FAST_ABOVE = 32 << 20
CLASSES = 16

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
I64 = NDArray[np.int64]
Seen = Callable[[NDArray[Any]], object]
"""Called with run after run of elements, in order, once each has its new values; it lies in the cache then."""


def unseen(run: NDArray[Any]) -> None:
    """Looks at nothing."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The streams of one frame: gaps, codes and magnitudes uint8, escapes uint16; changed = elements that moved."""

    changed: int
    gaps: U8
    codes: U8
    magnitudes: U8
    escapes: U16


class Kernels(Protocol):
    """The two hot loops of the step mode; implementations give the same bytes."""

    name: str

    def scan(self, old: U16, new: U16, bounds: I64) -> tuple[Steps, I64]:
        """The steps from ``old`` to ``new`` ([count] each) and the changed elements of every part.

        bounds: [parts + 1] ascending from 0 to count. Returns steps and int64 [parts].
        """
        ...

    def apply(self, steps: Steps, target: U16, seen: Seen = unseen) -> None:
        """Apply steps that passed ``check_steps`` to [count] elements in place; once, on their own base."""
        ...

    def find(self, old: U16, new: U16) -> tuple[I64, I64]:
        """Where old and new ([count] each) differ, ascending, and how many earlier elements have the class of each.

        Classes are those of the old bits (``classes_of``).
        """
        ...

    def split(self, before: U16, after: U16, ranks: I64) -> list[Steps]:
        """The steps of every class, from the old and new bits of changed elements and their ranks ([changed])."""
        ...

    def places(self, bits: U16, ranks: Sequence[I64]) -> list[I64]:
        """Where the elements with given ranks in their class stand; the inverse of ``find``.

        ranks: ascending, for each class. Raises DeltaCorrupt when a class has not that many elements.
        """
        ...


def ordered(bits: U16) -> NDArray[np.int16]:
    """Bits of 16-bit floats as integers in the order of the numbers; its own inverse on the same 16 bits.

    >>> ordered(np.array([0x8001, 0x8000, 0x0000, 0x0001], np.uint16)).tolist()
    [-2, -1, 0, 1]
    """
    signed = bits.view(np.int16)
    turned: NDArray[np.int16] = signed ^ ((signed >> 15) & np.int16(0x7FFF))
    return turned


def classes_of(bits: U16) -> U8:
    """The class of every element, from its old bits: uint8 [count], each below ``CLASSES``."""
    classes: U8 = CLASS_TABLE[bits >> np.uint16(7)]
    return classes


def changed_positions(old: NDArray[Any], new: NDArray[Any]) -> I64:
    """Positions at which two arrays of the same width differ, ascending."""
    found: list[I64] = []
    mask = np.empty(min(_CHUNK, old.size), bool)
    for start in range(0, old.size, _CHUNK):
        part = mask[: min(_CHUNK, old.size - start)]
        np.not_equal(old[start : start + _CHUNK], new[start : start + _CHUNK], out=part)
        here = np.flatnonzero(part)
        if start:
            here += start
        found.append(here)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def gaps_of(positions: I64) -> U8:
    """Ascending positions as the gap stream."""
    gaps = np.empty(positions.size, np.uint32)
    if positions.size:
        gaps[0] = positions[0]
        np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="unsafe")
        gaps[1:] -= 1
    if not positions.size or int(gaps.max()) < 255:
        return gaps.astype(np.uint8)
    full = gaps // np.uint32(255)
    ends = np.cumsum(full, dtype=np.int64)
    ends += np.arange(gaps.size)
    stream = np.full(int(ends[-1]) + 1, 255, np.uint8)
    stream[ends] = gaps - full * np.uint32(255)
    return stream


def positions_of(gaps: U8) -> I64:
    """The positions that a gap stream names (the inverse of ``gaps_of``)."""
    last = gaps != 255
    ends = gaps.astype(np.int64)
    ends += last
    np.cumsum(ends, out=ends)
    ends -= 1
    positions: I64 = ends[last]
    return positions


def check_gaps(gaps: U8, changed: int, count: int) -> None:
    """Raise DeltaCorrupt unless a gap stream names exactly ``changed`` positions below ``count``."""
    named = gaps.size - int(np.count_nonzero(gaps == 255))
    if named != changed or (gaps.size and gaps[-1] == 255):
        raise DeltaCorrupt(f"gap stream names {named} positions, the frame says {changed}")
    if int(gaps.sum(dtype=np.int64)) + changed > count:
        raise DeltaCorrupt(f"gap stream goes beyond the frame's {count} elements")


def check_steps(steps: Steps, count: int) -> None:
    """Raise DeltaCorrupt unless the four streams fit each other and a frame of ``count`` elements."""
    check_gaps(steps.gaps, steps.changed, count)
    if steps.codes.size != (steps.changed + 3) // 4:
        raise DeltaCorrupt(f"code stream has {steps.codes.size} bytes for {steps.changed} changes")
    unused = -steps.changed % 4
    if unused and steps.codes[-1] >> (8 - 2 * unused):
        raise DeltaCorrupt("code stream has bits after its end")
    if int(_LARGE_CODES[steps.codes].sum(dtype=np.int64)) != steps.magnitudes.size:
        raise DeltaCorrupt("code and magnitude streams disagree")
    if int(np.count_nonzero(steps.magnitudes == 255)) != steps.escapes.size:
        raise DeltaCorrupt("magnitude and escape streams disagree")


def steps_of(gaps: U8, before: U16, after: U16) -> Steps:
    """The streams of changed elements, from their gap stream, old bits and new bits ([changed] each)."""
    step = ordered(after).astype(np.int32)
    step -= ordered(before)
    down = step < 0
    np.abs(step, out=step)
    large = step > 1
    codes = np.zeros(-(-before.size // 4) * 4, np.uint8)
    codes[: before.size] = down
    codes[: before.size] |= large.view(np.uint8) << 1
    quads = codes.reshape(-1, 4)
    packed = quads[:, 0].copy()
    for place in (1, 2, 3):
        packed |= quads[:, place] << np.uint8(2 * place)
    beyond = step[large] - 2
    far = beyond >= 255
    escapes = after[large][far] if far.any() else np.empty(0, np.uint16)
    return Steps(int(before.size), gaps, packed, np.minimum(beyond, 255).astype(np.uint8), escapes)


def moved(before: U16, steps: Steps) -> U16:
    """New bits of changed elements, from their old bits ([changed]) and checked steps."""
    codes = _UNPACKED[steps.codes].reshape(-1)[: steps.changed]
    move = _UNIT_MOVES[codes]
    large = np.flatnonzero(codes >= 2) if steps.magnitudes.size else np.empty(0, np.int64)
    if large.size:
        move[large] *= steps.magnitudes.astype(np.int16) + np.int16(2)
    move += ordered(before)
    bits = ordered(move.view(np.uint16)).view(np.uint16)
    if steps.escapes.size:
        bits[large[steps.magnitudes == 255]] = steps.escapes
    return bits


class NumpyKernels:
    """The step mode in numpy views."""

    name = "numpy"

    def scan(self, old: U16, new: U16, bounds: I64) -> tuple[Steps, I64]:
        """The steps from old to new (see ``Kernels.scan``)."""
        positions = changed_positions(old, new)
        counts = np.diff(np.searchsorted(positions, bounds)).astype(np.int64)
        return steps_of(gaps_of(positions), old[positions], new[positions]), counts

    def apply(self, steps: Steps, target: U16, seen: Seen = unseen) -> None:
        """Apply checked steps in place (see ``Kernels.apply``)."""
        positions = positions_of(steps.gaps)
        target[positions] = moved(target[positions], steps)
        seen(target)

    def find(self, old: U16, new: U16) -> tuple[I64, I64]:
        """Changed positions and their places within their class (see ``Kernels.find``)."""
        positions = changed_positions(old, new)
        classes = classes_of(old)
        order = np.argsort(classes, kind="stable")
        place = np.empty(classes.size, np.int64)
        place[order] = np.arange(classes.size)
        first = np.searchsorted(classes[order], np.arange(CLASSES))
        return positions, place[positions] - first[classes[positions]]

    def split(self, before: U16, after: U16, ranks: I64) -> list[Steps]:
        """The steps of every class (see ``Kernels.split``)."""
        mine = classes_of(before)
        order = np.argsort(mine, kind="stable")
        bounds = np.searchsorted(mine[order], np.arange(CLASSES + 1))
        chosen = [order[start:stop] for start, stop in pairwise(bounds)]
        return [steps_of(gaps_of(ranks[at]), before[at], after[at]) for at in chosen]

    def places(self, bits: U16, ranks: Sequence[I64]) -> list[I64]:
        """Positions from places within classes (see ``Kernels.places``)."""
        classes = classes_of(bits)
        order = np.argsort(classes, kind="stable")
        bounds = np.searchsorted(classes[order], np.arange(CLASSES + 1))
        for one, rank in enumerate(ranks):
            if rank.size and rank[-1] >= bounds[one + 1] - bounds[one]:
                raise no_such_rank(one)
        return [order[start + rank] for start, rank in zip(bounds[:-1], ranks, strict=True)]


def no_such_rank(one: int) -> DeltaCorrupt:
    """The error for gaps that go beyond the elements of class ``one``."""
    return DeltaCorrupt(f"gap stream of class {one} goes beyond its elements: the frame was made on another base")


def kernels_for(nbytes: int) -> Kernels:
    """The kernels for an image of ``nbytes``: numba's above 32 MB where it is installed (extra ``fast``), else numpy's.

    Loading numba takes a second and 100 MB, which a small model never earns back.
    """
    if nbytes >= _FAST_ABOVE:
        fast = _fast_kernels()
        if fast is not None:
            return fast()
    return NumpyKernels()


def _fast_kernels() -> Callable[[], Kernels] | None:
    try:
        from headrace.schemas.delta_fast import NumbaKernels
    except ImportError:
        return None
    return NumbaKernels


CLASS_TABLE: U8 = np.clip(np.arange(512) % 256 - 111, 0, 13).astype(np.uint8)
"""The class of an element by its sign and exponent (bits 7 to 15)."""
_UNPACKED: U8 = np.stack([(np.arange(256) >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1).astype(np.uint8)
_LARGE_CODES: U8 = (_UNPACKED >= 2).sum(axis=1).astype(np.uint8)
_UNIT_MOVES: NDArray[np.int16] = np.array([1, -1, 1, -1], np.int16)
