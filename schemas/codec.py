"""Records to bytes and back: Confluent wire format around Avro, headers that a plain Kafka tool can read.

A value is one zero byte, a 4-byte big-endian schema id and the Avro body. Without a registry the id is
``0x40000000 | 30 bits of sha256(canonical form)``; a reader trusts the header ``hr-schema`` (64-bit fingerprint of the
writer's schema) before the id, so a registry that assigns its own ids later never collides (protocol 7). Writer schemas
known to the decoder are the packaged ones and those of earlier releases (``released/<version>/*.avsc``). A registry's
ids take the place of ours on the way to a topic (``stamps_of``); what is kept elsewhere keeps ours.
"""

import hashlib
import io
import struct
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import fastavro
import numpy as np

from headrace.schemas.avsc import packaged_schema
from headrace.schemas.checks import check_record, describe
from headrace.schemas.compiled import BYTE_ORDERS, Reader, Writer, instance_reader, instance_writer
from headrace.schemas.errors import InvalidRecord, UndecodableRecord
from headrace.schemas.records import RECORD_TYPES, Record
from headrace.schemas.released import released_schemas
from headrace.schemas.sequence_tail import SEQUENCES, SequenceTail

__all__ = (
    "FRAME_BYTES",
    "Headers",
    "add_writer_schema",
    "decode",
    "decode_received",
    "encode",
    "encode_after",
    "fingerprint",
    "fingerprint_of",
    "headers_of",
    "schema_id",
    "stamps_of",
    "to_plain",
)

Headers = Iterable[tuple[str, bytes | None]]
_PREFIX = struct.Struct(">bI")
FRAME_BYTES = _PREFIX.size
"""Bytes before the Avro body of a value: zero, then the schema's id."""
_OWN_IDS = 0x40000000
"""Ids that no registry assigned begin here."""


class _Known:
    """Writer schemas by fingerprint and by id: (record name, parsed schema)."""

    def __init__(self) -> None:
        self.by_fingerprint: dict[bytes, tuple[str, Any]] = {}
        self.by_id: dict[int, tuple[str, Any]] = {}

    def add_packaged(self, name: str) -> None:
        parsed, number, fingerprint = _packaged(name)
        self.by_fingerprint[fingerprint.encode()] = self.by_id[number] = name, parsed

    def add(self, schema: dict[str, Any], number: int | None = None) -> None:
        fingerprint = fingerprint_of(schema)
        packaged = _packaged(schema["name"]) if schema["name"] in RECORD_TYPES else None
        same = packaged is not None and packaged[2] == fingerprint  # then nothing has to be resolved at every record
        parsed = packaged[0] if packaged is not None and same else fastavro.parse_schema(schema)
        # one entry for one schema: ``decode_received`` asks whether two names mean the same
        entry = self.by_fingerprint.setdefault(fingerprint.encode(), (schema["name"], parsed))
        self.by_id[_id(_canonical(schema)) if number is None else number] = entry


def _canonical(schema: dict[str, Any]) -> str:
    return str(fastavro.schema.to_parsing_canonical_form(schema))


def fingerprint_of(schema: dict[str, Any]) -> str:
    """The 64-bit Avro fingerprint (16 hex digits) of any schema; words in ``doc`` and attributes change nothing."""
    return _mark(_canonical(schema))


def _mark(canonical: str) -> str:
    return str(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO"))


def _id(canonical: str) -> int:
    return _OWN_IDS | int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:4], "big") >> 2


@cache
def _packaged(name: str) -> tuple[Any, int, str]:
    schema = packaged_schema(name)
    canonical = _canonical(schema)
    return fastavro.parse_schema(schema), _id(canonical), _mark(canonical)


class _Reading(NamedTuple):
    """What it takes to read a record of one name."""

    schema: Any
    whole: Reader
    make: Callable[[dict[str, Any]], Any]
    """For what fastavro has read of another schema."""
    head: Reader | None
    """The fields before the sequences, where a record ends with them."""
    put_sequences: Callable[[Any, Any], None]


class _Writing(NamedTuple):
    """What it takes to write a record of one class."""

    prefix: bytes
    whole: Writer
    head: Writer | None
    """The fields before the sequences, where a record ends with them."""


@cache
def _reading(name: str) -> _Reading | None:
    cls: Any = RECORD_TYPES.get(name)
    if cls is None:
        return None
    ends = SequenceTail.ends(cls)
    return _Reading(
        schema=_packaged(name)[0],
        whole=instance_reader(cls),
        make=_from_avro(cls),
        head=instance_reader(cls, SEQUENCES) if ends else None,
        put_sequences=vars(cls)[SEQUENCES].__set__ if ends else _nowhere,
    )


@cache
def _writing(cls: type) -> _Writing:
    prefix = _PREFIX.pack(0, schema_id(cls.__name__))
    return _Writing(prefix, instance_writer(cls), instance_writer(cls, SEQUENCES) if SequenceTail.ends(cls) else None)


def _nowhere(record: Any, sequences: Any) -> None:
    """There is no such field."""


@cache
def _known() -> _Known:
    known = _Known()
    for name in RECORD_TYPES:
        known.add_packaged(name)
    for schemas in released_schemas().values():
        for name, schema in schemas.items():
            if name not in RECORD_TYPES or schema != packaged_schema(name):  # most have not changed
                known.add(schema)
    return known


def schema_id(name: str) -> int:
    """The id that stands in front of a record of this name when no registry assigned one."""
    return _packaged(name)[1]


def fingerprint(name: str) -> str:
    """The 64-bit Avro fingerprint (16 hex digits) of the packaged schema of a record."""
    return _packaged(name)[2]


def add_writer_schema(schema: dict[str, Any], number: int | None = None) -> None:
    """Let ``decode`` understand values written with another schema (a release, a registry's id ``number``)."""
    _known().add(schema, number)


def stamps_of(ids: Mapping[str, int]) -> dict[bytes, bytes]:
    """First bytes of values as ``encode`` writes them -> as a registry's readers want them.

    ``ids``: fingerprint of a schema -> id in the registry; fingerprints that are no packaged schema's are left out.
    """
    ours = {fingerprint(name): _PREFIX.pack(0, schema_id(name)) for name in RECORD_TYPES}
    return {ours[mark]: _PREFIX.pack(0, number) for mark, number in ids.items() if mark in ours}


def headers_of(record: Record, run: str, version: str) -> list[tuple[str, bytes]]:
    """The readable headers of a record: ``hr-record``, ``hr-run``, ``hr-version``, ``hr-schema`` (protocol 1)."""
    name = type(record).__name__
    return [
        ("hr-record", name.encode()),
        ("hr-run", run.encode()),
        ("hr-version", version.encode()),
        ("hr-schema", fingerprint(name).encode()),
    ]


def encode(record: Record) -> bytes:
    """The value of a record.

    Raises InvalidRecord when the record breaks a rule of ``checks`` or holds text that UTF-8 cannot say.
    """
    return encode_after(b"", record)


def encode_after(before: bytes, record: Record) -> bytes:
    """``before`` and behind it the value of a record, joined in one copy.

    Sequences that were decoded with ``keep_wire`` are written as the bytes they came in. Raises as ``encode`` does.
    """
    check_record(record)
    cls: Any = type(record)
    writing = _writing(cls)
    ending = SequenceTail.pieces(cast(Any, record).sequences) if writing.head is not None else None
    out = bytearray(writing.prefix)
    try:
        if writing.head is None or ending is None:
            writing.whole(record, out)
            return before + out
        writing.head(record, out)
        return b"".join((before, out, *ending))
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.start + 1]
        raise InvalidRecord(
            f"{describe(record)}: text holds {bad!r}, a lone surrogate that UTF-8 cannot encode; clean the text"
        ) from None
    except (ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise InvalidRecord(f"{describe(record)}: {error}") from error


def decode(value: bytes | None, headers: Headers | None = None, *, keep_wire: bool = False) -> Record:
    """The record in a value. Raises UndecodableRecord, saying what is wrong, when it is none of ours.

    With ``keep_wire`` its sequences remember their bytes, for who will write them on: ``encode`` is then a copy, at the
    price of the value's memory for as long as the sequences live.
    """
    checked, (name, writer), _ = _written(value, headers)
    return _read(checked, name, writer, keep_wire=keep_wire)


def decode_received(value: bytes | None, headers: Headers) -> tuple[Record, bool]:
    """The record in a value as a stage receives it, its sequences with their bytes; whether the value reads alone.

    A value reads alone when it means the same without its headers, in any later process. One with a registry's id does
    not: the run may be resumed without that registry. Raises UndecodableRecord.
    """
    checked, (name, writer), alone = _written(value, headers)
    return _read(checked, name, writer, keep_wire=True), alone


def _written(value: bytes | None, headers: Headers | None) -> tuple[bytes, tuple[str, Any], bool]:
    """A value that may be one of ours, its record's name and writer schema, and whether its id alone says so."""
    if value is None or len(value) < FRAME_BYTES:
        raise UndecodableRecord(f"{'null value' if value is None else f'{len(value)} bytes'}: too short for a record")
    magic, number = _PREFIX.unpack_from(value)
    if magic != 0:
        raise UndecodableRecord(f"first byte is {magic}, not 0: not in Confluent's wire format")
    known, named = _known(), b""
    entry = by_id = known.by_id.get(number)
    for header, mark in headers or ():
        if header == "hr-schema" and mark:
            named, entry = mark, known.by_fingerprint.get(mark) or by_id
            break
    if entry is None:
        words = named.decode("ascii", "replace") or "absent"
        raise UndecodableRecord(
            f"unknown schema: id {number}, hr-schema {words}; is the writer newer than this reader?"
        )
    return value, entry, entry is by_id and number >= _OWN_IDS


def _read(value: bytes, name: str, writer: Any, *, keep_wire: bool) -> Record:
    reading = _reading(name)
    if reading is None:
        raise UndecodableRecord(f"schema {name} is no record of this version")
    record: Record
    try:
        if writer is not reading.schema:
            stream = io.BytesIO(value)
            stream.seek(FRAME_BYTES)
            data: Any = fastavro.schemaless_reader(stream, writer, reading.schema)
            record = reading.make(data)
            end = stream.tell()
        elif keep_wire and reading.head is not None:
            record, end = reading.head(value, FRAME_BYTES)
            sequences, end = SequenceTail.read(value, end)
            reading.put_sequences(record, sequences)
        else:
            record, end = reading.whole(value, FRAME_BYTES)
    except (
        EOFError,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        OverflowError,
        struct.error,
        fastavro.read.SchemaResolutionError,
    ) as error:
        raise UndecodableRecord(f"broken Avro body of a {name}: {type(error).__name__} {error}") from error
    if end != len(value):
        raise UndecodableRecord(f"{len(value) - end} bytes follow the {name}")
    return record


def to_plain(record: Any) -> Any:
    """A record or part as JSON data: arrays become lists, nested parts dictionaries."""
    if is_dataclass(record):
        return {f.name: to_plain(getattr(record, f.name)) for f in fields(record)}
    if isinstance(record, np.ndarray):
        return record.tolist()
    if isinstance(record, Mapping):
        return {k: to_plain(v) for k, v in record.items()}
    if isinstance(record, list | tuple):
        return [to_plain(v) for v in record]
    return record.hex() if isinstance(record, bytes) else record


@cache
def _from_avro(cls: type) -> Callable[[dict[str, Any]], Any]:
    """A function from Avro data to an instance of a dataclass; the converters are worked out once per class."""
    hints = typing.get_type_hints(cls)
    plain, converted = [], []
    for f in fields(cls):
        put = getattr(cls, f.name).__set__
        if "dtype" in f.metadata:
            convert: Callable[[Any], Any] | None = _unpacker(f.metadata["dtype"])
        else:
            convert = _octets if hints[f.name] is bytes else _nested(hints[f.name])
        if convert is None:
            plain.append((f.name, put))
        else:
            converted.append((f.name, put, convert))

    def make(data: dict[str, Any]) -> Any:
        instance: Any = object.__new__(cls)
        for name, put in plain:
            put(instance, data[name])
        for name, put, convert in converted:
            put(instance, convert(data[name]))
        return instance

    return make


def _unpacker(dtype: str) -> Callable[[bytes], Any]:
    order = BYTE_ORDERS[dtype]

    def unpack(value: bytes | str) -> Any:
        data = value if type(value) is bytes else _octets(value)
        if len(data) % order.itemsize:
            raise UndecodableRecord(f"{len(data)} bytes are no whole number of {dtype} entries")
        return np.frombuffer(data, order)

    return unpack


def _octets(value: bytes | str) -> bytes:
    """Bytes as they are; the default of a field that the writer did not know comes as the text that a schema holds."""
    return value.encode("latin-1") if isinstance(value, str) else value


def _nested(hint: Any) -> Callable[[Any], Any] | None:
    """The converter for a type that holds dataclasses somewhere, None for plain data."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and is_dataclass(arguments[0]):
        one = _from_avro(arguments[0])  # type: ignore[arg-type]
        return lambda values: list(map(one, values))
    if origin is dict and is_dataclass(arguments[1]):
        one = _from_avro(arguments[1])  # type: ignore[arg-type]
        return lambda values: {k: one(v) for k, v in values.items()}
    if origin is types.UnionType:
        one = _from_avro(next(a for a in arguments if a is not type(None)))
        return lambda value: None if value is None else one(value)
    return _from_avro(hint) if is_dataclass(hint) else None  # type: ignore[arg-type]
