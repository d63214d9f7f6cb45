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
from operator import attrgetter
from typing import Any, NamedTuple

import fastavro
import numpy as np

from headrace.schemas.avsc import packaged_schema
from headrace.schemas.checks import check_record, describe
from headrace.schemas.errors import InvalidRecord, UndecodableRecord
from headrace.schemas.parts import Sequence
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
_BYTE_ORDERS = {"int32": "<i4", "float32": "<f4", "uint8": "u1"}


class _Known:
    """Writer schemas by fingerprint and by id: (record name, parsed schema)."""

    def __init__(self) -> None:
        self.by_fingerprint: dict[str, tuple[str, Any]] = {}
        self.by_id: dict[int, tuple[str, Any]] = {}

    def add(self, schema: dict[str, Any], number: int | None = None) -> None:
        fingerprint = fingerprint_of(schema)
        packaged = _packaged(schema["name"]) if schema["name"] in RECORD_TYPES else None
        same = packaged is not None and packaged[2] == fingerprint  # then nothing has to be resolved at every record
        parsed = packaged[0] if packaged is not None and same else fastavro.parse_schema(schema)
        # one entry for one schema: ``decode_received`` asks whether two names mean the same
        entry = self.by_fingerprint.get(fingerprint) or (schema["name"], parsed)
        self.by_fingerprint[fingerprint] = entry
        self.by_id[_id(schema) if number is None else number] = entry


def _canonical(schema: dict[str, Any]) -> str:
    return str(fastavro.schema.to_parsing_canonical_form(schema))


def fingerprint_of(schema: dict[str, Any]) -> str:
    """The 64-bit Avro fingerprint (16 hex digits) of any schema; words in ``doc`` and attributes change nothing."""
    return str(fastavro.schema.fingerprint(_canonical(schema), "CRC-64-AVRO"))


def _id(schema: dict[str, Any]) -> int:
    return _OWN_IDS | int.from_bytes(hashlib.sha256(_canonical(schema).encode()).digest()[:4], "big") >> 2


@cache
def _packaged(name: str) -> tuple[Any, int, str]:
    schema = packaged_schema(name)
    return fastavro.parse_schema(schema), _id(schema), fingerprint_of(schema)


@cache
def _tail(name: str) -> SequenceTail | None:
    schema = packaged_schema(name)
    return SequenceTail(schema) if SequenceTail.ends(schema) else None


class _Reading(NamedTuple):
    """What it takes to read a record of one name."""

    schema: Any
    make: Callable[[dict[str, Any]], Any]
    tail: SequenceTail | None
    make_with_tail: Callable[[dict[str, Any]], Any]
    """For data whose sequences were read already."""
    make_sequence: Callable[[dict[str, Any]], Any]
    """For what the tail reads of one."""


class _Writing(NamedTuple):
    """What it takes to write a record of one class."""

    schema: Any
    prefix: bytes
    data_of: Callable[[Any], dict[str, Any]]
    tail: SequenceTail | None
    data_before_tail: Callable[[Any], dict[str, Any]]


@cache
def _reading(name: str) -> _Reading | None:
    cls: Any = RECORD_TYPES.get(name)
    if cls is None:
        return None
    return _Reading(
        schema=_packaged(name)[0],
        make=_from_avro(cls),
        tail=_tail(name),
        make_with_tail=_from_avro(cls, ready=(SEQUENCES,)),
        make_sequence=_from_avro(Sequence, ready=SequenceTail.READY),
    )


@cache
def _writing(cls: type) -> _Writing:
    schema, number, _ = _packaged(cls.__name__)
    prefix = _PREFIX.pack(0, number)
    return _Writing(schema, prefix, _to_avro(cls), _tail(cls.__name__), _to_avro(cls, without=SEQUENCES))


@cache
def _known() -> _Known:
    known = _Known()
    for schemas in released_schemas().values():
        for schema in schemas.values():
            known.add(schema)
    for name in RECORD_TYPES:
        known.add(packaged_schema(name))
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
    tail = writing.tail
    sequences: list[Sequence] = getattr(record, SEQUENCES, [])
    ending = tail.pieces(sequences) if tail is not None else None
    out = io.BytesIO()
    out.write(before + writing.prefix)
    try:
        if tail is None or ending is None:
            fastavro.schemaless_writer(out, writing.schema, writing.data_of(record))
            return out.getvalue()
        fastavro.schemaless_writer(out, tail.head, writing.data_before_tail(record))
        return b"".join((out.getvalue(), *ending))
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
    known, named = _known(), _named(headers)
    by_id = known.by_id.get(number)
    entry = known.by_fingerprint.get(named) or by_id
    if entry is None:
        raise UndecodableRecord(
            f"unknown schema: id {number}, hr-schema {named or 'absent'}; is the writer newer than this reader?"
        )
    return value, entry, entry is by_id and number >= _OWN_IDS


def _read(value: bytes, name: str, writer: Any, *, keep_wire: bool) -> Record:
    reading = _reading(name)
    if reading is None:
        raise UndecodableRecord(f"schema {name} is no record of this version")
    stream = io.BytesIO(value)
    stream.seek(FRAME_BYTES)
    reader, tail = reading.schema, reading.tail
    data: Any
    try:
        if keep_wire and tail is not None and writer is reader:
            data = tail.read(value, stream, reading.make_sequence)
            record: Record = reading.make_with_tail(data)
        else:
            data = fastavro.schemaless_reader(stream, writer, None if writer is reader else reader)
            record = reading.make(data)
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
    if stream.tell() != len(value):
        raise UndecodableRecord(f"{len(value) - stream.tell()} bytes follow the {name}")
    return record


def _named(headers: Headers | None) -> str:
    """The fingerprint in the header ``hr-schema``, empty when there is none."""
    for name, value in headers or ():
        if name == "hr-schema" and value:
            return value.decode("ascii", "replace")
    return ""


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
def _to_avro(cls: type, without: str = "") -> Callable[[Any], dict[str, Any]]:
    """A function from a dataclass instance to Avro data; the converters are worked out once per class."""
    hints = typing.get_type_hints(cls)
    names, converted = [], []
    for f in fields(cls):
        if f.name == without:
            continue
        names.append(f.name)
        convert = _packer(f.metadata["dtype"]) if "dtype" in f.metadata else _outward(hints[f.name])
        if convert is not None:
            converted.append((f.name, convert))
    values = attrgetter(*names) if len(names) > 1 else lambda record: [getattr(record, name) for name in names]

    def convert_all(record: Any) -> dict[str, Any]:
        out = dict(zip(names, values(record), strict=True))
        for name, convert in converted:
            out[name] = convert(out[name])
        return out

    return convert_all


@cache
def _from_avro(cls: type, ready: tuple[str, ...] = ()) -> Callable[[dict[str, Any]], Any]:
    """The inverse of ``_to_avro``; the fields ``ready`` hold in the data what the instance is to hold.

    An instance is filled slot by slot: the ``__init__`` of a frozen class does the same in twice the time.
    """
    hints = typing.get_type_hints(cls)
    plain, converted = [], []
    for f in fields(cls):
        put = getattr(cls, f.name).__set__
        convert = None
        if f.name in ready:
            pass
        elif "dtype" in f.metadata:
            convert = _unpacker(f.metadata["dtype"])
        elif hints[f.name] is bytes:
            convert = _octets
        else:
            convert = _inward(hints[f.name])
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


def _packer(dtype: str) -> Callable[[Any], bytes]:
    order = _BYTE_ORDERS[dtype]
    return lambda array: np.ascontiguousarray(array, order).tobytes()


def _unpacker(dtype: str) -> Callable[[bytes], Any]:
    order = np.dtype(_BYTE_ORDERS[dtype])

    def unpack(value: bytes | str) -> Any:
        data = value if type(value) is bytes else _octets(value)
        if len(data) % order.itemsize:
            raise UndecodableRecord(f"{len(data)} bytes are no whole number of {dtype} entries")
        return np.frombuffer(data, order)

    return unpack


def _octets(value: bytes | str) -> bytes:
    """Bytes as they are; the default of a field that the writer did not know comes as the text that a schema holds."""
    return value.encode("latin-1") if isinstance(value, str) else value


def _nested(hint: Any, of: Callable[[type], Callable[[Any], Any]]) -> Callable[[Any], Any] | None:
    """The converter for a type that holds dataclasses somewhere, None for plain data."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and is_dataclass(arguments[0]):
        one = of(arguments[0])  # type: ignore[arg-type]
        return lambda values: list(map(one, values))
    if origin is dict and is_dataclass(arguments[1]):
        one = of(arguments[1])  # type: ignore[arg-type]
        return lambda values: {k: one(v) for k, v in values.items()}
    if origin is types.UnionType:
        inner = next(a for a in arguments if a is not type(None))
        one = of(inner)
        return lambda value: None if value is None else one(value)
    return of(hint) if is_dataclass(hint) else None  # type: ignore[arg-type]


def _outward(hint: Any) -> Callable[[Any], Any] | None:
    return _nested(hint, _to_avro)


def _inward(hint: Any) -> Callable[[Any], Any] | None:
    return _nested(hint, _from_avro)
