"""The step mode's two hot loops compiled by numba (extra ``fast``); same bytes as ``delta_steps.NumpyKernels``.

Importing this module needs numba. Compiled code is cached on disk beside the module or in the user's cache, and runs
without the interpreter lock, so segments are coded on several threads.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.delta_steps import (
    CLASS_TABLE,
    CLASSES,
    I64,
    U8,
    U16,
    NumpyKernels,
    Seen,
    Steps,
    no_such_rank,
    unseen,
)

__all__ = ("NumbaKernels",)

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
_BLOCK = 1 << 15
_RUN = 1 << 17
"""Elements of a run that is brought into the cache, changed and looked at before the next one."""

_Loop = TypeVar("_Loop", bound=Callable[..., object])


def _compiled(loop: _Loop) -> _Loop:
    return cast(_Loop, numba.njit(cache=True, nogil=True, boundscheck=False)(loop))


@_compiled
def _ordered(bits: int) -> int:
    # Without a branch: the sign of a weight is as good as random.
    signed = int(bits) - ((int(bits) & 0x8000) << 1)
    return signed ^ ((signed >> 15) & 0x7FFF)


@_compiled
def _find(old: U16, new: U16, old_quads: U64, new_quads: U64, start: int, hits: U32) -> int:
    """Positions below ``start + _BLOCK`` at which old and new differ, into ``hits``; how many."""
    found = 0
    stop = min(start + _BLOCK, old.size)
    whole = min(stop // 4, old_quads.size)
    for quad in range(start // 4, whole):
        if old_quads[quad] != new_quads[quad]:
            for position in range(quad * 4, quad * 4 + 4):
                hits[found] = position
                found += old[position] != new[position]
    for position in range(max(start, whole * 4), stop):
        hits[found] = position
        found += old[position] != new[position]
    return found


@_compiled
def _scan(
    old: U16,
    new: U16,
    old_quads: U64,
    new_quads: U64,
    bounds: I64,
    counts: I64,
    hits: U32,
    gaps: U8,
    codes: U8,
    magnitudes: U8,
    escapes: U16,
) -> tuple[int, int, int, int]:
    """Fill the streams and return their fill: gap bytes, changes, magnitudes, escapes.

    Finding and coding take turns by blocks: each is a tight loop, and the positions stay in the cache.
    """
    ngaps, changes, nmagnitudes, nescapes, last, part, packed = 0, 0, 0, 0, -1, 0, 0
    for start in range(0, old.size, _BLOCK):
        found = _find(old, new, old_quads, new_quads, start, hits)
        for hit in range(found):
            position = int(hits[hit])
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
            step = _ordered(new[position]) - _ordered(old[position])
            code = int(step < 0)
            step = abs(step)
            if step > 1:
                code |= 2
                if step >= 257:
                    magnitudes[nmagnitudes] = 255
                    escapes[nescapes] = new[position]
                    nescapes += 1
                else:
                    magnitudes[nmagnitudes] = step - 2
                nmagnitudes += 1
            packed |= code << (changes & 3) * 2
            codes[changes >> 2] = packed
            changes += 1
            if changes & 3 == 0:
                packed = 0
    return ngaps, changes, nmagnitudes, nescapes


@_compiled
def _touch(quads: U64) -> int:
    """Bring memory into the cache in order: far faster than what steps reach for one at a time."""
    seen = np.uint64(0)
    for line in range(0, quads.size, 8):
        seen |= quads[line]
    return int(seen)


@_compiled
def _apply(gaps: U8, codes: U8, magnitudes: U8, escapes: U16, target: U16, at: I64, stop: int) -> None:
    """Apply the steps below ``stop``. at int64 [5]: where the last call ended in target and in the four streams."""
    position, read, change, magnitude, escape = at
    while read < gaps.size:
        gap = gaps[read]
        if gap < 255 and position + gap + 1 >= stop:
            break
        read += 1
        if gap == 255:
            position += 255
            continue
        position += gap + 1
        code = int(codes[change >> 2] >> ((change & 3) * 2)) & 3
        change += 1
        step = 1
        if code & 2:
            more = magnitudes[magnitude]
            magnitude += 1
            if more == 255:
                target[position] = escapes[escape]
                escape += 1
                continue
            step = int(more) + 2
        value = _ordered(target[position])
        # Wraps like numpy's int16 where a wrong base leads out of range; the segment digest then tells.
        value += (step ^ -(code & 1)) + (code & 1)
        target[position] = value ^ ((value >> 15 & 1) * 0x7FFF)
    at[:] = position, read, change, magnitude, escape


@_compiled
def _mark(
    position: int,
    old: U16,
    new: U16,
    table: U8,
    seen: NDArray[np.int32],
    positions: U32,
    ranks: U32,
    found: int,
) -> int:
    """Note an element if it changed, and count it among its class."""
    one = table[old[position] >> 7]
    if old[position] != new[position]:
        positions[found] = position
        ranks[found] = seen[0, one] + seen[1, one] + seen[2, one] + seen[3, one]
        found += 1
    seen[position & 3, one] += 1
    return found


@_compiled
def _find_ranks(
    old: U16, new: U16, old_quads: U64, new_quads: U64, table: U8, seen: NDArray[np.int32], positions: U32, ranks: U32
) -> int:
    """Changed positions and their places within their class; how many, -1 when there is no room for all.

    ``seen`` [4, classes]: elements so far, by position mod 4, so that one count need not wait for another.
    """
    found = 0
    for quad in range(old_quads.size):
        start = quad * 4
        if old_quads[quad] != new_quads[quad]:
            if found + 8 > positions.size:
                return -1
            for position in range(start, start + 4):
                found = _mark(position, old, new, table, seen, positions, ranks, found)
        else:
            seen[0, table[old[start] >> 7]] += 1
            seen[1, table[old[start + 1] >> 7]] += 1
            seen[2, table[old[start + 2] >> 7]] += 1
            seen[3, table[old[start + 3] >> 7]] += 1
    for position in range(old_quads.size * 4, old.size):
        found = _mark(position, old, new, table, seen, positions, ranks, found)
    return found


@_compiled
def _split(
    before: U16,
    after: U16,
    ranks: I64,
    table: U8,
    fill: NDArray[np.int64],
    gaps: U8,
    codes: U8,
    magnitudes: U8,
    escapes: U16,
) -> None:
    """The streams of all classes one after the other, and ``fill`` [5, classes]: gap bytes, changes, magnitudes,
    escapes, last rank. Counts first, so that every class knows where it begins.
    """
    classes = fill.shape[1]
    fill[4] = -1
    for change in range(ranks.size):
        one = table[before[change] >> 7]
        fill[0, one] += (ranks[change] - fill[4, one] - 1) // 255 + 1
        fill[1, one] += 1
        fill[4, one] = ranks[change]
    # Where each class begins in gaps, codes, and magnitudes and escapes.
    at = np.zeros((4, classes), np.int64)
    for one in range(1, classes):
        at[0, one] = at[0, one - 1] + fill[0, one - 1]
        at[1, one] = at[1, one - 1] + (fill[1, one - 1] + 3) // 4
        at[2, one] = at[2, one - 1] + fill[1, one - 1]
    at[3] = at[2]
    done = np.zeros(classes, np.int64)
    fill[4] = -1
    for change in range(ranks.size):
        one = table[before[change] >> 7]
        gap = ranks[change] - fill[4, one] - 1
        fill[4, one] = ranks[change]
        while gap >= 255:
            gaps[at[0, one]] = 255
            at[0, one] += 1
            gap -= 255
        gaps[at[0, one]] = gap
        at[0, one] += 1
        step = _ordered(after[change]) - _ordered(before[change])
        code = int(step < 0)
        step = abs(step)
        if step > 1:
            code |= 2
            if step >= 257:
                magnitudes[at[2, one]] = 255
                escapes[at[3, one]] = after[change]
                at[3, one] += 1
                fill[3, one] += 1
            else:
                magnitudes[at[2, one]] = step - 2
            at[2, one] += 1
            fill[2, one] += 1
        codes[at[1, one] + (done[one] >> 2)] |= code << (done[one] & 3) * 2
        done[one] += 1


@_compiled
def _places(bits: U16, ranks: I64, nexts: I64, ends: I64, table: U8, places: I64) -> None:
    """``ranks`` and ``places`` hold all classes one after the other; ``nexts`` to ``ends`` is what is left of each.

    ``left`` counts the elements of a class down to its next change, so most elements cost one decrement.
    """
    left = np.full(nexts.size, -1, np.int64)
    for one in range(nexts.size):
        if nexts[one] < ends[one]:
            left[one] = ranks[nexts[one]]
    for position in range(bits.size):
        one = table[bits[position] >> 7]
        before = left[one]
        left[one] = before - 1
        if before == 0:
            place = nexts[one]
            places[place] = position
            nexts[one] = place + 1
            if place + 1 < ends[one]:
                left[one] = ranks[place + 1] - ranks[place] - 1


class NumbaKernels:
    """The step mode in compiled loops; one object may be used from several threads."""

    name = "numba"

    def __init__(self) -> None:
        self._rooms = threading.local()

    def scan(self, old: U16, new: U16, bounds: I64) -> tuple[Steps, I64]:
        """The steps from old to new (see ``delta_steps.Kernels.scan``)."""
        gaps, codes, magnitudes, escapes = self._room(old.size)
        hits = np.empty(_BLOCK + 1, np.uint32)
        counts = np.zeros(bounds.size - 1, np.int64)
        whole = old.size // 4 * 4
        old_quads, new_quads = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
        filled = _scan(old, new, old_quads, new_quads, bounds, counts, hits, gaps, codes, magnitudes, escapes)
        ngaps, changed, nmagnitudes, nescapes = filled
        packed = codes[: (changed + 3) // 4]
        return Steps(changed, gaps[:ngaps], packed, magnitudes[:nmagnitudes], escapes[:nescapes]), counts

    def apply(self, steps: Steps, target: U16, seen: Seen = unseen) -> None:
        """Apply checked steps in place (see ``delta_steps.Kernels.apply``)."""
        # A copy is aligned and writable whatever frame it came from: one compiled variant serves all.
        escapes = np.array(steps.escapes, np.uint16)
        at = np.array((-1, 0, 0, 0, 0), np.int64)
        for start in range(0, target.size, _RUN):
            part = target[start : start + _RUN]
            _touch(part[: part.size // 4 * 4].view(np.uint64))
            _apply(steps.gaps, steps.codes, steps.magnitudes, escapes, target, at, start + part.size)
            seen(part)

    def find(self, old: U16, new: U16) -> tuple[I64, I64]:
        """Changed positions and their places within their class (see ``delta_steps.Kernels.find``)."""
        room = old.size // 4 + 8
        positions, ranks = np.empty(room, np.uint32), np.empty(room, np.uint32)
        whole = old.size // 4 * 4
        old_quads, new_quads = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
        seen = np.zeros((4, CLASSES), np.int32)
        found = _find_ranks(old, new, old_quads, new_quads, CLASS_TABLE, seen, positions, ranks)
        if found < 0:  # as many changes are coded in another mode, whatever their classes
            return NumpyKernels().find(old, new)
        return positions[:found].astype(np.int64), ranks[:found].astype(np.int64)

    def split(self, before: U16, after: U16, ranks: I64) -> list[Steps]:
        """The steps of every class (see ``delta_steps.Kernels.split``)."""
        fill = np.zeros((5, CLASSES), np.int64)
        most = ranks.size + int(ranks.max(initial=0)) // 255 * CLASSES + CLASSES
        gaps, magnitudes = np.empty(most, np.uint8), np.empty(ranks.size, np.uint8)
        codes, escapes = np.zeros(ranks.size // 4 + CLASSES, np.uint8), np.empty(ranks.size, np.uint16)
        _split(before, after, ranks, CLASS_TABLE, fill, gaps, codes, magnitudes, escapes)
        ngaps, changes, nmagnitudes, nescapes = fill[:4]
        begin = np.cumsum([ngaps, (changes + 3) // 4, changes], axis=1) - [ngaps, (changes + 3) // 4, changes]
        out = []
        for one in range(CLASSES):
            g, c, m = (int(n) for n in begin[:, one])
            out.append(
                Steps(
                    int(changes[one]),
                    gaps[g : g + int(ngaps[one])],
                    codes[c : c + (int(changes[one]) + 3) // 4],
                    magnitudes[m : m + int(nmagnitudes[one])],
                    escapes[m : m + int(nescapes[one])],
                )
            )
        return out

    def places(self, bits: U16, ranks: Sequence[I64]) -> list[I64]:
        """Positions from places within classes (see ``delta_steps.Kernels.places``)."""
        ends = np.cumsum([rank.size for rank in ranks])
        joined = np.concatenate(ranks)
        places = np.empty(joined.size, np.int64)
        nexts = np.append(0, ends[:-1])
        _places(bits, joined, nexts, ends, CLASS_TABLE, places)
        for one in range(CLASSES):
            if nexts[one] < ends[one]:
                raise no_such_rank(one)
        return np.split(places, ends[:-1])

    def _room(self, count: int) -> tuple[U8, U8, U8, U16]:
        """This thread's stream buffers, large enough for a frame in which every element changed; overwritten by the
        next scan on the thread."""
        held: tuple[int, tuple[U8, U8, U8, U16]] | None = getattr(self._rooms, "held", None)
        if held is None or held[0] < count:
            gaps = np.empty(count + count // 255 + 1, np.uint8)
            codes = np.empty(count // 4 + 1, np.uint8)
            self._rooms.held = held = (count, (gaps, codes, np.empty(count, np.uint8), np.empty(count, np.uint16)))
        return held[1]
