"""Sequences at the end of a record, read together with the bytes they came in and written as those bytes again.

In: a value whose record ends with a list of Sequences. Out: the sequences, and pieces for ``codec``. A stage that
passes sequences on (a Trajectory's into a Member, a Member's into an Item) encodes only the fields before them, and
what arrives is bit for bit what was sampled.
"""

from collections.abc import Iterable
from dataclasses import fields

import numpy as np

from headrace.schemas.compiled import BYTE_ORDERS, instance_reader, put_long, read_long
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.parts import Sequence

__all__ = ("SEQUENCES", "SequenceTail")

SEQUENCES = "sequences"
"""The field with which such a record ends."""
_DTYPES = {f.name: BYTE_ORDERS[f.metadata["dtype"]] for f in fields(Sequence) if "dtype" in f.metadata}
_ARRAYS = tuple((dtype, dtype.itemsize, getattr(Sequence, name).__set__) for name, dtype in _DTYPES.items())
"""The arrays of a Sequence in their order; only its extras follow them."""
_put_extras = vars(Sequence)["extras"].__set__
_whole = instance_reader(Sequence)
_front = instance_reader(Sequence, next(iter(_DTYPES)))


class SequenceTail:
    """What can be done with the end of a record whose last field is the list of sequences."""

    @staticmethod
    def ends(cls: type) -> bool:
        """Whether a record's last field is the list of sequences."""
        return fields(cls)[-1].name == SEQUENCES

    @staticmethod
    def read(value: bytes, at: int) -> tuple[list[Sequence], int]:
        """The sequences that begin at a byte, each with its bytes (``Sequence.wire``), and the position behind them.

        Arrays are views of the value. Raises as ``compiled.Reader`` does for a broken body.
        """
        sequences: list[Sequence] = []
        while True:
            count, at = read_long(value, at)
            if count == 0:
                return sequences, at
            if count < 0:  # a block with its size in bytes before it
                count, (_, at) = -count, read_long(value, at)
            for _ in range(count):
                sequence, end = _one(value, at)
                if not sequence.extras:  # a dictionary could be changed afterwards; everything else is immutable
                    sequence.keep_wire(memoryview(value)[at:end])
                sequences.append(sequence)
                at = end

    @staticmethod
    def pieces(sequences: Iterable[Sequence]) -> list[bytes | memoryview] | None:
        """What stands for these sequences at the end of a body; None when one of them did not come over the wire."""
        wires = [sequence.wire for sequence in sequences]
        if not wires or None in wires:
            return None
        count = bytearray()
        put_long(count, len(wires))
        return [bytes(count), *(wire for wire in wires if wire is not None), b"\0"]


def _one(value: bytes, at: int) -> tuple[Sequence, int]:
    """The Sequence that begins at a byte, and where it ends."""
    start = at
    sequence, at = _front(value, at)
    for dtype, width, put in _ARRAYS:
        size, at = read_long(value, at)
        if size % width or size < 0:
            raise UndecodableRecord(f"{size} bytes are no whole number of {dtype.name} entries")
        put(sequence, np.frombuffer(value, dtype, size // width, at) if size else np.frombuffer(b"", dtype))
        at += size
    if value[at] != 0:
        return _whole(value, start)
    _put_extras(sequence, {})
    return sequence, at + 1
