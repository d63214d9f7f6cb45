"""Compiled readers and writers: the bytes are Avro's, whatever the values; what cannot be held is refused."""

from __future__ import annotations

import dataclasses
import io
import struct
import types
import typing
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headrace.schemas.avsc import packaged_schema
from headrace.schemas.codec import to_plain
from headrace.schemas.compiled import instance_reader, instance_writer, put_long, read_long
from headrace.schemas.parts import Extra, Message, Sequence, Source
from headrace.schemas.records import RECORD_TYPES, Prompt

PARSED = {name: fastavro.parse_schema(packaged_schema(name)) for name in RECORD_TYPES}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
LONGS = st.one_of(st.integers(-3, 130), st.integers(-(1 << 63), (1 << 63) - 1))

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: LONGS, float: st.floats(allow_nan=False), bool: st.booleans(), str: TEXT, bytes: st.binary()
}  # fmt: skip


def values(hint: Any, field: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold."""
    if "dtype" in getattr(field, "metadata", {}):
        return st.binary(max_size=40).map(lambda b: np.frombuffer(b * 4, "u1").view(field.metadata["dtype"]))
    if hint in PLAIN:
        return PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return st.lists(values(arguments[0], None), max_size=3)
    if origin is dict:
        return st.dictionaries(TEXT, values(arguments[1], None), max_size=3)
    if origin is types.UnionType:
        return st.none() | values(next(a for a in arguments if a is not type(None)), None)
    return instances(hint)


def instances(cls: Any) -> st.SearchStrategy[Any]:
    """Any instance of a record or part."""
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: values(hints[f.name], f) for f in dataclasses.fields(cls)})


def avro(record: Any) -> Any:
    """A record as fastavro takes it."""
    if dataclasses.is_dataclass(record):
        return {f.name: avro(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, np.ndarray):
        return record.tobytes()
    if isinstance(record, dict):
        return {key: avro(value) for key, value in record.items()}
    return [avro(value) for value in record] if isinstance(record, list) else record


def written(record: Any) -> bytes:
    """By the compiled writer."""
    out = bytearray()
    instance_writer(type(record))(record, out)
    return bytes(out)


@pytest.mark.parametrize("name", sorted(RECORD_TYPES))
@settings(deadline=None, max_examples=12, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_the_bytes_are_those_of_another_avro_writer_and_come_back_as_the_record(name: str, data: Any) -> None:
    record = data.draw(instances(RECORD_TYPES[name]))
    out = io.BytesIO()
    fastavro.schemaless_writer(out, PARSED[name], avro(record))
    assert written(record) == out.getvalue()
    back, end = instance_reader(RECORD_TYPES[name])(b"before" + out.getvalue() + b"behind", 6)
    assert end == 6 + len(out.getvalue())
    assert type(back) is RECORD_TYPES[name]
    assert repr(to_plain(back)) == repr(to_plain(record)), "repr, because a nan is not itself"


@given(LONGS)
def test_longs_come_back(number: int) -> None:
    out = bytearray()
    put_long(out, number)
    assert read_long(bytes(out), 0) == (number, len(out))


def test_reading_and_writing_may_end_before_a_field() -> None:
    sequence = Sequence(
        policy=3, role="r", prompt_length=1, end_reason="stop", oldest_version=-1, newest_version=-1,
        extras={"x": Extra(dtype="u", shape=[2, 3])},
    )  # fmt: skip
    whole, head = written(sequence), bytearray()
    instance_writer(Sequence, "tokens")(sequence, head)
    assert whole.startswith(head) and len(head) < len(whole)
    front, end = instance_reader(Sequence, "tokens")(whole, 0)
    assert (front.policy, front.role, end) == (3, "r", len(head))
    with pytest.raises(AttributeError):
        _ = front.tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"row": 1.0}, {"row": "1"}, {"row": None}, {"row": 1 << 63}, {"prompt": None}, {"prompt": b""}, {"prompt": 0},
        {"messages": None}, {"messages": 0}, {"messages": [None]}, {"columns": {1: "x"}}, {"columns": {"x": 1}},
        {"prompt": "\ud800"},
    ],
)  # fmt: skip
def test_what_a_schema_cannot_hold_is_refused(wrong: dict[str, Any]) -> None:
    good = Prompt(prompt_id="p", stream="s", dataset="d", row=1, epoch=0, position=0)
    with pytest.raises((TypeError, ValueError, AttributeError, OverflowError, struct.error)):
        written(dataclasses.replace(good, **wrong))


@pytest.mark.parametrize("size", [b"\x01", b"\x09", b"\x7f", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"])
def test_a_text_of_a_length_that_is_not_there_is_refused(size: bytes) -> None:
    """Negative ones too, which would lead a reader back."""
    with pytest.raises((EOFError, IndexError, ValueError)):
        instance_reader(Message)(b"\x02a" + size + b"b", 0)


def test_numbers_of_numpy_travel_as_what_they_are() -> None:
    plain = Source(topic="t", partition=1, offset=300)
    assert written(dataclasses.replace(plain, partition=np.int32(1), offset=np.int64(300))) == written(plain)  # type: ignore[arg-type]
