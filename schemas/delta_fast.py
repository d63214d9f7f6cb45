"""The step mode's two hot loops compiled by numba (extra ``fast``); same bytes as ``delta_steps.NumpyKernels``.

Importing this module needs numba. Compiled code is cached on disk beside the module or in the user's cache, and runs
without the interpreter lock, so segments are coded on several threads.
"""

import threading
from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.delta_steps import I64, U8, U16, Steps

__all__ = ("NumbaKernels",)

_Loop = TypeVar("_Loop", bound=Callable[..., object])


def _compiled(loop: _Loop) -> _Loop:
    return cast(_Loop, numba.njit(cache=True, nogil=True, boundscheck=False)(loop))


@_compiled
def _ordered(bits: int) -> int:
    value = int(bits)
    return -(value & 0x7FFF) - 1 if value & 0x8000 else value


@_compiled
def _scan(
    old: U16,
    new: U16,
    old_quads: NDArray[np.uint64],
    new_quads: NDArray[np.uint64],
    bounds: I64,
    counts: I64,
    gaps: U8,
    codes: U8,
    magnitudes: U8,
    escapes: U16,
) -> tuple[int, int, int, int]:
    """Fill the streams and return their fill: gap bytes, changes, magnitudes, escapes."""
    ngaps, changes, nmagnitudes, nescapes, last, part = 0, 0, 0, 0, -1, 0
    for quad in range((old.size + 3) // 4):
        if quad < old_quads.size and old_quads[quad] == new_quads[quad]:
            continue
        for position in range(quad * 4, min(quad * 4 + 4, old.size)):
            was, now = old[position], new[position]
            if was == now:
                continue
            gap = position - last - 1
            last = position
            while gap >= 255:
                gaps[ngaps] = 255
                ngaps += 1
                gap -= 255
            gaps[ngaps] = gap
            ngaps += 1
            while position >= bounds[part + 1]:
                part += 1
            counts[part] += 1
            step = _ordered(now) - _ordered(was)
            code = 0
            if step < 0:
                code, step = 1, -step
            if step > 1:
                code |= 2
                if step >= 257:
                    magnitudes[nmagnitudes] = 255
                    escapes[nescapes] = now
                    nescapes += 1
                else:
                    magnitudes[nmagnitudes] = step - 2
                nmagnitudes += 1
            shift = (changes & 3) * 2
            if shift == 0:
                codes[changes >> 2] = code
            else:
                codes[changes >> 2] |= code << shift
            changes += 1
    return ngaps, changes, nmagnitudes, nescapes


@_compiled
def _apply(gaps: U8, codes: U8, magnitudes: U8, escapes: U16, target: U16) -> None:
    position, change, magnitude, escape = -1, 0, 0, 0
    for index in range(gaps.size):
        gap = gaps[index]
        if gap == 255:
            position += 255
            continue
        position += gap + 1
        code = (codes[change >> 2] >> ((change & 3) * 2)) & 3
        change += 1
        step = 1
        if code & 2:
            step = int(magnitudes[magnitude]) + 2
            magnitude += 1
            if step == 257:
                target[position] = escapes[escape]
                escape += 1
                continue
        value = _ordered(target[position])
        value = value - step if code & 1 else value + step
        # Wraps like numpy's int16 where a wrong base leads out of range; the segment digest then tells.
        value = ((value + 0x8000) & 0xFFFF) - 0x8000
        target[position] = ((-value - 1) | 0x8000) if value < 0 else value


class NumbaKernels:
    """The step mode in compiled loops; one object may be used from several threads."""

    name = "numba"

    def __init__(self) -> None:
        self._rooms = threading.local()

    def scan(self, old: U16, new: U16, bounds: I64) -> tuple[Steps, I64]:
        """The steps from old to new (see ``delta_steps.Kernels.scan``)."""
        gaps, codes, magnitudes, escapes = self._room(old.size)
        counts = np.zeros(bounds.size - 1, np.int64)
        whole = old.size // 4 * 4
        old_quads, new_quads = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
        filled = _scan(old, new, old_quads, new_quads, bounds, counts, gaps, codes, magnitudes, escapes)
        ngaps, changed, nmagnitudes, nescapes = filled
        packed = codes[: (changed + 3) // 4]
        return Steps(changed, gaps[:ngaps], packed, magnitudes[:nmagnitudes], escapes[:nescapes]), counts

    def apply(self, steps: Steps, target: U16) -> None:
        """Apply checked steps in place (see ``delta_steps.Kernels.apply``)."""
        # A copy is aligned and writable whatever frame it came from: one compiled variant serves all.
        _apply(steps.gaps, steps.codes, steps.magnitudes, np.array(steps.escapes, np.uint16), target)

    def _room(self, count: int) -> tuple[U8, U8, U8, U16]:
        """This thread's stream buffers, large enough for a frame in which every element changed; overwritten by the
        next scan on the thread."""
        held: tuple[int, tuple[U8, U8, U8, U16]] | None = getattr(self._rooms, "held", None)
        if held is None or held[0] < count:
            gaps = np.empty(count + count // 255 + 1, np.uint8)
            codes = np.empty(count // 4 + 1, np.uint8)
            self._rooms.held = held = (count, (gaps, codes, np.empty(count, np.uint8), np.empty(count, np.uint16)))
        return held[1]
