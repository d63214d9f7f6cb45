"""Sequences at the end of a record, read together with the bytes they came in and written as those bytes again.

In: the schema of a record whose last field is a list of Sequences. Out: readers and pieces for ``codec``. A stage that
passes sequences on (a Trajectory's into a Member, a Member's into an Item) encodes only the fields before them, and
what arrives is bit for bit what was sampled.
"""

import io
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import fastavro
import numpy as np

from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.parts import Extra, Sequence

__all__ = ("SEQUENCES", "SequenceTail")

SEQUENCES = "sequences"
"""The field with which such a record ends."""
_ARRAYS = tuple(
    (name, np.dtype(dtype), np.dtype(dtype).itemsize)
    for name, dtype in (("tokens", "<i4"), ("logprobs", "<f4"), ("mask", "u1"), ("versions", "<i4"))
)
"""The arrays of a Sequence in their order; only its extras follow them."""
_EXTRAS = "extras"


class SequenceTail:
    """A record's schema in parts: the fields before ``sequences``, and a Sequence's before its arrays and behind."""

    READY: ClassVar[tuple[str, ...]] = (*(name for name, _, _ in _ARRAYS), _EXTRAS)
    """Fields of a Sequence that ``read`` does not leave to the converter."""

    def __init__(self, schema: dict[str, Any]) -> None:
        *head, last = schema["fields"]
        self.head: Any = fastavro.parse_schema({**schema, "fields": head})
        item = last["type"]["items"]
        names = [field["name"] for field in item["fields"]]
        first = names.index(self.READY[0])
        if tuple(names[first:]) != self.READY:
            raise ValueError(f"a Sequence ends with {names[first:]}; it has to end with {list(self.READY)}")
        self._front: Any = fastavro.parse_schema({**item, "fields": item["fields"][:first]})
        self._back: Any = fastavro.parse_schema({**item, "fields": item["fields"][-1:]})

    @staticmethod
    def ends(schema: dict[str, Any]) -> bool:
        """Whether a schema's last field is the list of sequences."""
        return bool(schema["fields"][-1]["name"] == SEQUENCES)

    def read(self, value: bytes, stream: io.BytesIO, convert: Callable[[dict[str, Any]], Sequence]) -> dict[str, Any]:
        """The fields before the sequences as Avro data and the sequences, each with its bytes (``Sequence.wire``).

        Arrays are views of the value. ``stream`` stands at the start of the body within ``value`` and is left behind
        its end. Raises what fastavro raises for a broken body.
        """
        data: Any = fastavro.schemaless_reader(stream, self.head, None)
        sequences: list[Sequence] = []
        at = stream.tell()
        while True:
            count, at = _read_long(value, at)
            if count == 0:
                break
            if count < 0:  # a block with its size in bytes before it
                count, (_, at) = -count, _read_long(value, at)
            for _ in range(count):
                fields, end = self._fields(value, at, stream)
                sequence = convert(fields)
                if not sequence.extras:  # a dictionary could be changed afterwards; everything else is immutable
                    sequence.keep_wire(memoryview(value)[at:end])
                sequences.append(sequence)
                at = end
        stream.seek(at)
        data[SEQUENCES] = sequences
        return data  # type: ignore[no-any-return]

    def _fields(self, value: bytes, at: int, stream: io.BytesIO) -> tuple[dict[str, Any], int]:
        """The fields of the Sequence that begins at a byte, and where it ends."""
        stream.seek(at)
        fields: Any = fastavro.schemaless_reader(stream, self._front, None)
        at = stream.tell()
        for name, dtype, width in _ARRAYS:
            size, at = _read_long(value, at)
            if size % width or size < 0:
                raise UndecodableRecord(f"{size} bytes are no whole number of {dtype} entries")
            fields[name] = np.frombuffer(value, dtype, size // width, at) if size else np.frombuffer(b"", dtype)
            at += size
        if value[at] == 0:
            fields[_EXTRAS] = {}
            return fields, at + 1
        stream.seek(at)
        extras: Any = fastavro.schemaless_reader(stream, self._back, None)
        fields[_EXTRAS] = {name: Extra(**extra) for name, extra in extras[_EXTRAS].items()}
        return fields, stream.tell()

    @staticmethod
    def pieces(sequences: Iterable[Sequence]) -> list[bytes | memoryview] | None:
        """What stands for these sequences at the end of a body; None when one of them did not come over the wire."""
        wires = [sequence.wire for sequence in sequences]
        if not wires or None in wires:
            return None
        return [_write_long(len(wires)), *(wire for wire in wires if wire is not None), b"\0"]


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
