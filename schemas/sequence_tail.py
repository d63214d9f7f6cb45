"""Sequences at the end of a record, read together with the bytes they came in and written as those bytes again.

In: the schema of a record whose last field is a list of Sequences. Out: readers and pieces for ``codec``. A stage that
passes sequences on (a Trajectory's into a Member, a Member's into an Item) encodes only the fields before them, and
what arrives is bit for bit what was sampled.
"""

import io
from collections.abc import Callable, Iterable
from typing import Any

import fastavro
import numpy as np

from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.parts import Sequence

__all__ = ("SequenceTail",)

_FIELD = "sequences"
_ARRAYS = ("versions", "mask", "logprobs", "tokens")
"""Arrays of a Sequence from the last to the first."""


class SequenceTail:
    """The two halves of one record's schema: the fields before ``sequences``, and one Sequence."""

    def __init__(self, schema: dict[str, Any]) -> None:
        *head, last = schema["fields"]
        self.head: Any = fastavro.parse_schema({**schema, "fields": head})
        self._item: Any = fastavro.parse_schema(last["type"]["items"])

    @staticmethod
    def ends(schema: dict[str, Any]) -> bool:
        """Whether a schema's last field is the list of sequences."""
        return bool(schema["fields"][-1]["name"] == _FIELD)

    def read(
        self, value: bytes, stream: io.BytesIO, convert: Callable[[dict[str, Any]], Sequence]
    ) -> tuple[dict[str, Any], list[Sequence]]:
        """The fields before the sequences as Avro data, and the sequences, each with its bytes (``Sequence.wire``).

        ``stream`` stands at the start of the body within ``value`` and is left behind its end. Raises what fastavro
        raises for a broken body.
        """
        data: Any = fastavro.schemaless_reader(stream, self.head, None)
        sequences: list[Sequence] = []
        view = memoryview(value)
        at = stream.tell()
        while True:
            count, at = _read_long(value, at)
            if count == 0:
                break
            if count < 0:  # a block with its size in bytes before it
                count, (_, at) = -count, _read_long(value, at)
            stream.seek(at)
            for _ in range(count):
                sequence = convert(fastavro.schemaless_reader(stream, self._item, None))  # type: ignore[arg-type]
                begin, at = at, stream.tell()
                if not sequence.extras:  # a dictionary could be changed afterwards; everything else is immutable
                    sequence.keep_wire(view[begin:at])
                    _share(sequence, view, at - 1)
                sequences.append(sequence)
        stream.seek(at)
        return data, sequences

    @staticmethod
    def pieces(sequences: Iterable[Sequence]) -> list[bytes | memoryview] | None:
        """What stands for these sequences at the end of a body; None when one of them did not come over the wire."""
        wires = [sequence.wire for sequence in sequences]
        if not wires or None in wires:
            return None
        return [_write_long(len(wires)), *(wire for wire in wires if wire is not None), b"\0"]


def _share(sequence: Sequence, view: memoryview, end: int) -> None:
    """Let the arrays of a sequence be views of the value that it keeps anyway; they end before its (empty) extras."""
    for name in _ARRAYS:
        array = getattr(sequence, name)
        start = end - array.nbytes
        length = _write_long(array.nbytes)
        if view[start - len(length) : start] != length:
            return  # a writer that says lengths in more bytes than it needs: the copies will do
        if array.size:
            object.__setattr__(sequence, name, np.frombuffer(view, array.dtype, array.size, start))
        end = start - len(length)


def _read_long(value: bytes, at: int) -> tuple[int, int]:
    """An Avro long and the position behind it."""
    number = shift = 0
    while True:
        byte = value[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
        shift += 7
        if shift > 63:
            raise UndecodableRecord(f"a number of more than 64 bits at byte {at}")


def _write_long(number: int) -> bytes:
    """An Avro long >= 0."""
    number <<= 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
