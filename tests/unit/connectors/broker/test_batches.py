"""Record batches: headers to the byte, records of every codec, markers, and damage that is told as damage."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from batch_maker import Pair, build_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.connectors.broker import batches
from headrace.connectors.broker.batches import HEADER_SIZE, Header, Record, read_header
from headrace.connectors.broker.crc32c import crc32c

Build = Callable[..., bytearray]
PAIRS = st.lists(
    st.tuples(st.none() | st.binary(max_size=80), st.none() | st.binary(max_size=80)), min_size=1, max_size=12
)
READABLE = [0, 1, 4]


def _records(batch: bytes | bytearray) -> list[Record]:
    header = read_header(batch)
    content = batches.inflated(batch, header)
    assert content is not None
    return list(batches.records(content, header))


def test_a_header_is_the_61_bytes_of_message_format_2() -> None:
    data = struct.pack(
        ">qiibIhiqqqhii", 1 << 40, 60, 7, 2, 0xDEADBEEF, 0b110100, 4, 1_000, 1_009, 99, 3, 50, 5
    )  # fmt: skip
    assert len(data) == HEADER_SIZE == 61
    header = read_header(b"xy" + data, 2)
    assert header == Header(1 << 40, 60, 7, 2, 0xDEADBEEF, 0b110100, 4, 1_000, 1_009, 99, 3, 50, 5)
    assert (header.size, header.last_offset, header.codec) == (72, (1 << 40) + 4, 4)
    assert (header.is_transactional, header.is_control) == (True, True)
    plain = header._replace(attributes=0b001)
    assert (plain.is_transactional, plain.is_control, plain.codec) == (False, False, 1)
    with pytest.raises(struct.error):
        read_header(data, 1)


@given(pairs=PAIRS, codec=st.sampled_from(READABLE), base=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_records_come_back_with_offsets_times_keys_and_values(pairs: list[Pair], codec: int, base: int) -> None:
    times = [10**12 + 7 * i - (i % 3) * 1000 for i in range(len(pairs))]
    batch = build_batch(pairs, timestamps=times, codec=codec)
    batches.place(batch, base)
    header = read_header(batch)
    assert batches.checksum_matches(batch, header), "the base offset is under no checksum"
    assert (header.max_timestamp, header.record_count) == (max(times), len(pairs))
    found = _records(batch)
    assert [(r.offset, r.timestamp) for r in found] == [(base + i, time) for i, time in enumerate(times)]
    assert [(r.key, r.has_value) for r in found] == [(key, value is not None) for key, value in pairs]


@given(pairs=PAIRS, codec=st.sampled_from(READABLE), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_rebuilt_batch_holds_the_kept_records_and_nothing_else(
    pairs: list[Pair], codec: int, data: st.DataObject
) -> None:
    batch = build_batch(pairs, 7, 1, 3, timestamps=[5_000 + i for i in range(len(pairs))], codec=codec)
    batches.place(batch, 40)
    before, header = _records(batch), read_header(batch)
    kept = [r for r in before if data.draw(st.booleans())] or before[-1:]
    smaller = batches.rebuilt(header, kept)
    after = read_header(smaller)
    assert batches.checksum_matches(smaller, after)
    assert _records(smaller) == kept
    assert (after.base_offset, after.last_offset) == (header.base_offset, header.last_offset), "readers hold offsets"
    assert (after.producer_id, after.producer_epoch, after.base_sequence) == (7, 1, 3)
    assert (after.record_count, after.max_timestamp) == (len(kept), max(r.timestamp for r in kept))
    assert after.codec == codec


@pytest.mark.parametrize("commit", [True, False])
def test_a_marker_is_a_control_batch_of_one_record(commit: bool) -> None:
    marker = batches.control_batch(77, 5, commit, 1_234)
    header = read_header(marker)
    assert batches.checksum_matches(marker, header)
    assert (header.is_control, header.is_transactional, header.record_count) == (True, True, 1)
    assert (header.producer_id, header.producer_epoch, header.max_timestamp) == (77, 5, 1_234)
    assert header.size == len(marker)
    assert batches.marker_commits(bytes(marker)) is commit
    (record,) = _records(marker)
    assert record.key == struct.pack(">hh", 0, commit), "version 0, type 1 for commit and 0 for abort (KIP-98)"
    assert record.has_value


def test_every_flipped_bit_behind_the_checksum_is_noticed_and_none_before_it() -> None:
    batch = build_batch([(b"k", b"v")])
    header = read_header(batch)
    for bit in range(21 * 8, len(batch) * 8):
        broken = bytearray(batch)
        broken[bit // 8] ^= 1 << bit % 8
        assert not batches.checksum_matches(broken, header)
    batches.place(batch, 2**50)
    assert batches.checksum_matches(batch, read_header(batch))
    assert header.crc == crc32c(bytes(batch[21:]))


@pytest.mark.parametrize("codec", [2, 3])
def test_codecs_that_are_not_read_here_are_said_to_be_so(codec: int) -> None:
    batch = build_batch([(b"k", b"v")])
    header = read_header(batch)._replace(attributes=codec)
    assert batches.inflated(batch, header) is None


@pytest.mark.parametrize("codec", [1, 4])
def test_damaged_compression_is_a_value_error(codec: int) -> None:
    batch = build_batch([(b"k", b"v" * 50)], codec=codec)
    header = read_header(batch)
    for content in (b"", b"\0" * 40, bytes(batch[HEADER_SIZE : HEADER_SIZE + 10])):
        broken = bytes(batch[:HEADER_SIZE]) + content
        try:
            found = batches.inflated(broken, header._replace(length=len(broken) - 12))
        except ValueError as error:
            assert "cannot be read" in str(error)
            continue
        assert found is not None
        with pytest.raises((ValueError, IndexError)):
            list(batches.records(found, header))


@given(st.binary(max_size=60), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_records_of_random_bytes_are_records_or_an_error_that_is_expected(content: bytes, count: int) -> None:
    header = read_header(build_batch([(b"k", b"v")]))._replace(record_count=count)
    try:
        found = list(batches.records(content, header))
    except (ValueError, IndexError):
        return
    assert len(found) == count
    assert sum(len(r.body) for r in found) <= len(content)


def test_a_record_that_passes_the_end_of_its_batch_is_damage() -> None:
    header = read_header(build_batch([(b"k", b"v")]))
    with pytest.raises(ValueError, match="passes the end"):
        list(batches.records(b"\x7f\0\0\0\0\0\0", header))
    with pytest.raises(ValueError, match="passes the end"):
        list(batches.records(b"\x01", header))
