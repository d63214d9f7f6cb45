"""Sequences passed on by their bytes: equal to what the plain way writes, and only where nothing can differ."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas import codec
from headrace.schemas.avsc import packaged_schema
from headrace.schemas.codec import decode, encode, encode_after, headers_of, to_plain
from headrace.schemas.errors import InvalidRecord, UndecodableRecord
from headrace.schemas.parts import Extra, Sequence
from headrace.schemas.records import Item, Member, Partial, Trajectory
from headrace.schemas.sequence_tail import SequenceTail


def sequence(tokens: int, policy: int = 0, **more: Any) -> Sequence:
    mask = np.array([i % 2 for i in range(tokens)], "uint8")
    return Sequence(
        policy=policy, role="policy ü", prompt_length=1, end_reason="stop",
        oldest_version=3 if tokens > 1 else -1, newest_version=3,
        tokens=np.arange(tokens, dtype="int32"), logprobs=np.linspace(-2, 0, tokens, dtype="float32"), mask=mask,
        versions=np.where(mask, 3, -1).astype("int32"), **more,
    )  # fmt: skip


def partial(*sequences: Sequence) -> Partial:
    return Partial(group=1, replica=0, attempt=0, worker="w", incarnation=1, written_ms=0, sequences=[*sequences])


def member(sequences: list[Sequence]) -> Member:
    return Member(
        policy=0, group=1, replica=2, attempt=0, stream="main", prompt_id="p", status="train", raw_reward=1.0,
        shaped_reward=0.5, length=1, oldest_version=3, newest_version=3, end_reason="stop", sequences=sequences,
    )  # fmt: skip


def kept(record: Any) -> Any:
    """The record as a stage receives it."""
    return decode(encode(record), keep_wire=True)


@settings(deadline=None)
@given(st.lists(st.integers(0, 70), max_size=4))
def test_what_is_read_with_its_bytes_is_the_record_and_is_written_as_the_same_bytes(lengths: list[int]) -> None:
    record = partial(*(sequence(n, policy=i) for i, n in enumerate(lengths)))
    read = kept(record)
    assert to_plain(read) == to_plain(decode(encode(record))) == to_plain(record)
    assert all(s.wire is not None for s in read.sequences)
    assert encode(read) == encode(record)


def test_a_member_of_passed_on_sequences_is_bit_for_bit_one_that_was_encoded() -> None:
    read = kept(partial(sequence(9), sequence(5, policy=1), sequence(300)))
    for chosen in ([0, 1, 2], [2], [1, 0], []):
        passed = member([read.sequences[i] for i in chosen])
        plain = member([replace(s) for s in passed.sequences])
        assert all(s.wire is None for s in plain.sequences), "a copy has no bytes of its own"
        assert encode(passed) == encode(plain)


def test_one_sequence_that_was_made_here_makes_the_whole_list_encoded() -> None:
    read = kept(partial(sequence(9)))
    mixed = [read.sequences[0], sequence(4)]
    assert SequenceTail.pieces(mixed) is None
    assert to_plain(decode(encode(member(mixed)))) == to_plain(member(mixed))


def test_a_changed_copy_is_written_as_it_is_now() -> None:
    read = kept(partial(sequence(9))).sequences[0]
    changed = replace(read, end_reason="length")
    assert changed.wire is None and not changed.sound
    assert decode(encode(partial(changed))).sequences[0].end_reason == "length"  # type: ignore[union-attr]


def test_a_sequence_with_extras_is_never_passed_on_because_a_dictionary_can_change() -> None:
    read = kept(partial(sequence(4, extras={"values": Extra(dtype="float32", shape=[1], data=b"1234")})))
    assert read.sequences[0].wire is None
    read.sequences[0].extras["more"] = Extra(dtype="uint8", shape=[1], data=b"1")
    assert set(decode(encode(read)).sequences[0].extras) == {"values", "more"}  # type: ignore[union-attr]


def test_arrays_with_kept_bytes_cannot_be_changed() -> None:
    read = kept(partial(sequence(4))).sequences[0]
    for name in ("tokens", "logprobs", "mask", "versions"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(read, name)[0] = 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_may_not_travel_is_refused_when_it_is_passed_on(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(sequence(4), logprobs=np.array([0, bad, 0, 0], "float32"))
    with monkeypatch.context() as patch:
        patch.setattr(codec, "check_record", lambda record: None)  # a foreign writer that checks nothing
        value = encode(partial(broken))
    read = decode(value, keep_wire=True)
    for _ in range(2):
        with pytest.raises(InvalidRecord, match=r"sequences\[0\].logprobs\[1\]"):
            encode(member(read.sequences))  # type: ignore[union-attr]


def test_a_sequence_is_checked_once_only_if_nobody_can_change_it() -> None:
    own = sequence(4)
    encode(partial(own))
    assert not own.sound
    own.logprobs[1] = np.nan
    with pytest.raises(InvalidRecord):
        encode(partial(own))
    read = kept(partial(sequence(4)))
    encode(read)
    assert read.sequences[0].sound


def test_copies_and_pickles_forget_the_bytes() -> None:
    read = kept(partial(sequence(9))).sequences[0]
    for twin in (copy.deepcopy(read), pickle.loads(pickle.dumps(read))):
        assert twin.wire is None
        assert to_plain(twin) == to_plain(read)


def test_arrays_with_kept_bytes_lie_in_them_and_cost_no_memory_of_their_own() -> None:
    value = encode(partial(sequence(300), sequence(0), sequence(1), sequence(65)))
    whole = np.frombuffer(value, "uint8")
    for read, plain in zip(decode(value, keep_wire=True).sequences, decode(value).sequences, strict=True):  # type: ignore[union-attr]
        for name in ("tokens", "logprobs", "mask", "versions"):
            kept_array, own = getattr(read, name), getattr(plain, name)
            assert kept_array.dtype == own.dtype and kept_array.tobytes() == own.tobytes()
            assert not own.size or np.shares_memory(kept_array, whole)
            assert not np.shares_memory(own, whole)


def test_a_length_said_in_more_bytes_than_needed_is_read_all_the_same() -> None:
    value = encode(partial(sequence(3)))
    wire = bytes(kept(partial(sequence(3))).sequences[0].wire)
    padded = wire[:-14] + b"\x98\x00" + wire[-13:]  # 12 bytes of versions, their length in two bytes
    read = decode(value.replace(wire, padded), keep_wire=True)
    assert to_plain(read) == to_plain(partial(sequence(3)))


def test_only_records_that_end_with_sequences_have_a_tail() -> None:
    with_tail = {cls.__name__ for cls in (Trajectory, Partial, Member, Item)}
    assert {n for n, cls in codec.RECORD_TYPES.items() if SequenceTail.ends(cls)} == with_tail


@settings(deadline=None)
@given(st.data())
def test_a_broken_value_is_named_or_read_the_same_with_and_without_its_bytes(data: st.DataObject) -> None:
    value = bytearray(encode(partial(sequence(6), sequence(2))))
    if data.draw(st.booleans()):
        del value[data.draw(st.integers(5, len(value) - 1)) :]
    else:
        value[data.draw(st.integers(5, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    results = []
    for keep in (False, True):
        try:
            results.append(repr(to_plain(decode(bytes(value), keep_wire=keep))))
        except UndecodableRecord:
            results.append("undecodable")
    assert results[0] == results[1]


def test_a_list_in_blocks_with_their_sizes_is_read_too() -> None:
    """Avro lets a writer cut a list into blocks, with a negative count and a size in bytes before each."""
    whole = encode(partial(sequence(3), sequence(5)))
    wires = [bytes(s.wire) for s in kept(partial(sequence(3), sequence(5))).sequences]
    head = whole[: whole.index(wires[0]) - 1]
    blocks = b"".join(b"\x01" + _zigzag(len(wire)) + wire for wire in wires)  # count -1, then the size
    read = decode(head + blocks + b"\0", keep_wire=True)
    assert to_plain(read) == to_plain(decode(head + blocks + b"\0")) == to_plain(partial(sequence(3), sequence(5)))
    assert encode(read) == whole


def _zigzag(number: int) -> bytes:
    number, out = number << 1, bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def test_encode_after_puts_something_before_the_value() -> None:
    for record in (partial(sequence(3)), kept(partial(sequence(3)))):
        assert encode_after(b"note\n", record) == b"note\n" + encode(record)


def reads_alone(value: bytes, headers: Any) -> bool:
    """Whether a stage may keep the value without its headers."""
    return codec.decode_received(value, headers)[1]


def test_a_value_reads_alone_when_its_id_says_what_its_header_says() -> None:
    record = partial(sequence(3))
    value, headers = encode(record), headers_of(record, "r", "0")
    assert reads_alone(value, headers) and reads_alone(value, [])
    foreign = b"\0\0\0\0\x07" + value[5:]  # an id that some registry assigned
    assert decode(foreign, headers) is not None
    assert not reads_alone(foreign, headers)


def test_a_value_with_a_registrys_id_does_not_read_alone_even_when_the_id_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = copy.copy(codec._known())
    known.by_id, known.by_fingerprint = dict(known.by_id), dict(known.by_fingerprint)
    monkeypatch.setattr(codec, "_known", lambda: known)
    record = partial(sequence(3))
    value, headers = encode(record), headers_of(record, "r", "0")
    codec.add_writer_schema(packaged_schema("Partial"), 77)
    stamped = b"\0\0\0\0\x4d" + value[5:]
    assert decode(stamped) is not None
    assert not reads_alone(stamped, headers), "a process without the registry could not read it from its state"
    assert reads_alone(value, headers), "what this process writes has an id of its own all the same"
