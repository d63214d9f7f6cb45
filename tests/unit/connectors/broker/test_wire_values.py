"""Primitive types in both encodings: the bytes of Kafka's protocol guide, and input that lies about its length."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.connectors.broker.wire import MalformedRequest, Reader, Writer

TEXT = st.text(max_size=200)
EXPECTED = (MalformedRequest, struct.error, IndexError, UnicodeDecodeError)


def _written(write: Callable[[Writer], Any], flexible: bool = False) -> bytes:
    out = Writer(flexible)
    write(out)
    return b"".join(bytes(piece) for piece in out.body() if isinstance(piece, bytes | bytearray))


def _reader(data: bytes, flexible: bool = False) -> Reader:
    return Reader(memoryview(data), flexible)


@pytest.mark.parametrize(
    ("write", "classic", "flexible"),
    [
        (lambda out: out.int8(-1), "ff", "ff"),
        (lambda out: out.int16(0x0102), "0102", "0102"),
        (lambda out: out.int32(-2), "fffffffe", "fffffffe"),
        (lambda out: out.int64(1), "0000000000000001", "0000000000000001"),
        (lambda out: out.string("ab"), "00026162", "036162"),
        (lambda out: out.string(""), "0000", "01"),
        (lambda out: out.string(None), "ffff", "00"),
        (lambda out: out.string("é"), "0002c3a9", "03c3a9"),
        (lambda out: out.blob(b"ab"), "000000026162", "036162"),
        (lambda out: out.blob(b""), "00000000", "01"),
        (lambda out: out.blob(None), "ffffffff", "00"),
        (lambda out: out.length(3), "00000003", "04"),
        (lambda out: out.length(-1), "ffffffff", "00"),
        (lambda out: out.array([1, 2], out.int8), "000000020102", "030102"),
        (lambda out: out.tags(), "", "00"),
        (lambda out: out.varint(0), "00", "00"),
        (lambda out: out.varint(300), "ac02", "ac02"),
    ],
)
def test_values_are_written_as_the_protocol_guide_says(
    write: Callable[[Writer], None], classic: str, flexible: str
) -> None:
    assert _written(write).hex() == classic
    assert _written(write, flexible=True).hex() == flexible


@given(st.integers(0, 2**63))
def test_varints_come_back(value: int) -> None:
    data = _written(lambda out: out.varint(value))
    reader = _reader(data)
    assert reader.varint() == value
    assert reader.position == len(data) == max(1, -(-value.bit_length() // 7))


@given(
    flexible=st.booleans(),
    text=st.none() | TEXT,
    blob=st.none() | st.binary(max_size=200),
    numbers=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20),
    pairs=st.lists(st.tuples(TEXT, st.integers(-(2**63), 2**63 - 1)), max_size=5),
)
def test_everything_written_is_read(
    flexible: bool, text: str | None, blob: bytes | None, numbers: list[int], pairs: list[tuple[str, int]]
) -> None:
    out = Writer(flexible)
    out.string(text)
    out.blob(blob)
    out.array(numbers, out.int32)
    out.array(pairs, lambda pair: (out.string(pair[0]), out.int64(pair[1]), out.tags())[0])
    out.int8(True)
    out.tags()
    reader = Reader(memoryview(out.buffer), flexible)
    assert reader.nullable_string() == text
    read = reader.nullable_bytes()
    assert (None if read is None else bytes(read)) == blob
    assert reader.array(reader.int32) == numbers
    assert reader.array(lambda: (reader.string(), reader.int64(), reader.tags())[:2]) == pairs
    assert reader.boolean() is True
    reader.tags()
    assert reader.position == len(out.buffer)


@pytest.mark.parametrize("flexible", [False, True])
def test_null_and_empty_are_told_apart_where_it_matters(flexible: bool) -> None:
    out = Writer(flexible)
    for _ in range(2):
        out.string(None)
        out.length(-1)
    reader = Reader(memoryview(out.buffer), flexible)
    assert reader.nullable_string() is None
    assert reader.nullable_array(reader.int8) is None
    assert reader.string() == ""
    assert reader.array(reader.int8) == []


def test_unknown_tagged_fields_are_skipped() -> None:
    data = bytes([2, 0, 3]) + b"abc" + bytes([200, 1, 0]) + b"\x07"
    reader = _reader(data, flexible=True)
    reader.tags()
    assert reader.int8() == 7
    classic = _reader(data)
    classic.tags()
    assert classic.position == 0, "other versions have none"


@pytest.mark.parametrize(
    ("data", "flexible", "read"),
    [
        (b"\x00\x05abc", False, lambda r: r.string()),
        (b"\x06abc", True, lambda r: r.string()),
        (b"\x7f\xff\xff\xffabc", False, lambda r: r.nullable_bytes()),
        (b"\xff\xff\xff\xff\x7f", True, lambda r: r.nullable_bytes()),
        (b"\x7f\xff\xff\xff", False, lambda r: r.length()),
        (b"\xff\xff\xff\xff\x0f", True, lambda r: r.length()),
        (b"\x02\x00\x09ab", True, lambda r: r.tags()),
    ],
)
def test_lengths_beyond_the_request_are_malformed_before_anything_is_allocated(
    data: bytes, flexible: bool, read: Callable[[Reader], Any]
) -> None:
    with pytest.raises(MalformedRequest):
        read(_reader(data, flexible))


@pytest.mark.parametrize("data", [b"\x00\x02\xff\xfe", b"\x00\x02\xc3("])
def test_text_that_is_no_utf8_is_an_expected_error(data: bytes) -> None:
    with pytest.raises(UnicodeDecodeError):
        _reader(data).string()


@given(st.binary(max_size=40), st.booleans())
def test_random_bytes_are_read_or_end_in_an_error_that_the_server_expects(data: bytes, flexible: bool) -> None:
    reader = _reader(data, flexible)
    try:
        reader.string()
        reader.nullable_bytes()
        reader.array(reader.int16)
        reader.tags()
        reader.int64()
    except EXPECTED:
        return
    assert reader.position <= len(data)


def test_a_view_of_bytes_is_no_copy() -> None:
    data = bytearray(b"\x00\x00\x00\x03abc")
    view = Reader(memoryview(data)).nullable_bytes()
    assert view is not None
    data[4] = ord("x")
    assert bytes(view) == b"xbc", "batches are written to the log from the buffer that they were received in"
