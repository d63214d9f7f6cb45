"""Primitive types in both encodings."""

import pytest

from headrace.connectors.broker.wire import MalformedRequest, Reader, Writer


@pytest.mark.parametrize("flexible", [False, True])
def test_what_is_written_is_read_back(flexible: bool) -> None:
    out = Writer(flexible)
    out.string("naïve ☃")
    out.string(None)
    out.string("x" * 300)
    out.blob(b"\0\1")
    out.blob(None)
    out.array([1, -2, 3], out.int64)
    out.tags()
    reader = Reader(memoryview(bytes(out.buffer)), flexible)
    assert reader.nullable_string() == "naïve ☃"
    assert reader.nullable_string() is None
    assert reader.string() == "x" * 300
    assert bytes(reader.nullable_bytes() or b"") == b"\0\1"
    assert reader.nullable_bytes() is None
    assert reader.array(reader.int64) == [1, -2, 3]
    reader.tags()
    assert reader.position == len(out.buffer)


def test_unknown_tagged_fields_are_skipped() -> None:
    reader = Reader(memoryview(b"\x02\x00\x03abc\x07\x01z\x2a"), True)
    reader.tags()
    assert reader.int8() == 42


@pytest.mark.parametrize("data", [b"\x00\x09abc", b"\x7f\xff\xff\xff"])
def test_a_length_that_passes_the_end_is_refused(data: bytes) -> None:
    reader = Reader(memoryview(data))
    with pytest.raises(MalformedRequest):
        if len(data) == 5:
            reader.string()
        else:
            reader.array(reader.int8)
