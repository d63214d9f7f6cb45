"""Frames: exact on every bit pattern, small, the same from both kernels, and safe against damaged bytes."""

import itertools
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from headrace.schemas import delta_codec
from headrace.schemas.delta_codec import (
    ABSOLUTE,
    CONTEXT,
    DENSE,
    STEPS,
    apply_frame,
    encode_absolute,
    encode_context,
    encode_dense,
    encode_segment,
    encode_steps,
    frame_mode,
)
from headrace.schemas.delta_context import steps_by_class
from headrace.schemas.delta_layout import DeltaCorrupt, Piece
from headrace.schemas.delta_steps import (
    Kernels,
    NumpyKernels,
    check_steps,
    gaps_of,
    kernels_for,
    ordered,
    positions_of,
)

U16 = NDArray[np.uint16]
SPECIAL = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 0x7FFF, 0x3F80, 0xBF80],
    np.uint16,
)


def all_kernels() -> list[Kernels]:
    kernels: list[Kernels] = [NumpyKernels()]
    try:
        from headrace.schemas.delta_fast import NumbaKernels
    except ImportError:
        return kernels
    return [*kernels, NumbaKernels()]


KERNELS = all_kernels()


def bfloat16(values: NDArray[np.float32]) -> U16:
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)


def moved(old: U16, share: float, rng: np.random.Generator) -> U16:
    """A share of the elements moved by the steps that training shows: mostly one, some far, some to any bits."""
    new = old.copy()
    at = np.flatnonzero(rng.random(old.size) < share)
    step = rng.choice(np.array([1, 1, 1, 1, 1, 1, 2, 5, 200, 257, 900], np.int16), at.size)
    step *= rng.choice(np.array([-1, 1], np.int16), at.size)
    new[at] = ordered((ordered(old[at]) + step).view(np.uint16)).view(np.uint16)
    wild = at[rng.random(at.size) < 0.01]
    new[wild] = rng.choice(SPECIAL, wild.size)
    return new


def rebuilt(old: NDArray[np.generic], payload: bytes, kernels: Kernels) -> NDArray[np.generic]:
    target = old.copy()
    apply_frame(payload, target, kernels)
    return target


def context_frame(old: U16, new: U16, kernels: Kernels) -> bytes:
    return encode_context(steps_by_class(old, new, kernels)[0], new.size)


def one_piece(count: int) -> list[Piece]:
    return [Piece(0, 0, count)] if count else []


def test_the_order_of_bits_is_the_order_of_numbers() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    assert np.array_equal(ordered(ordered(bits).view(np.uint16)).view(np.uint16), bits)
    numbers = (bits.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(numbers)
    by_order = numbers[finite][np.argsort(ordered(bits)[finite])]
    assert (np.diff(by_order) >= 0).all()


@given(st.lists(st.integers(0, 3000), max_size=60))
def test_gaps_are_exact(gaps: list[int]) -> None:
    positions = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    assert np.array_equal(positions_of(gaps_of(positions)), positions)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.name)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_bit_pattern_survives_every_mode(kernels: Kernels, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 70))
    values = st.one_of(st.integers(0, 0xFFFF), st.sampled_from(SPECIAL.tolist()))
    old = data.draw(arrays(np.uint16, count, elements=values))
    near = data.draw(arrays(np.int16, count, elements=st.sampled_from([0, 0, 0, 1, -1, 2, 255, 256, 257, -300])))
    new = ordered((ordered(old) + near).view(np.uint16)).view(np.uint16)
    if data.draw(st.booleans()):
        new = data.draw(arrays(np.uint16, count, elements=values))
    steps, _ = kernels.scan(old, new, np.array([0, count], np.int64))
    every = (
        encode_steps(steps, count), context_frame(old, new, kernels), encode_absolute(old, new), encode_dense(new),
    )  # fmt: skip
    for payload in every:
        assert np.array_equal(rebuilt(old, payload, kernels), new)
    frames, counts = encode_segment(old, new, one_piece(count), kernels)
    target = old.copy()
    for frame in frames:
        apply_frame(frame.payload, target[frame.start : frame.start + frame.count], kernels)
    assert np.array_equal(target, new)
    assert counts == [int((old != new).sum())]


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.006, 0.02, 0.3, 0.9, 1.0])
def test_both_kernels_give_the_same_bytes(share: float) -> None:
    rng = np.random.default_rng(7)
    old = bfloat16((rng.standard_normal(200_003) * 0.02).astype(np.float32))
    new = moved(old, share, rng)
    bounds = np.array([0, 5, 70_000, 70_001, old.size], np.int64)
    outcomes = [kernels.scan(old, new, bounds) for kernels in KERNELS]
    differs = old != new
    for kernels, (steps, counts) in zip(KERNELS, outcomes, strict=True):
        check_steps(steps, old.size)
        assert encode_steps(steps, old.size) == encode_steps(outcomes[0][0], old.size)
        assert counts.tolist() == [int(differs[a:b].sum()) for a, b in itertools.pairwise(bounds)]
        assert np.array_equal(rebuilt(old, encode_steps(steps, old.size), kernels), new)
        assert context_frame(old, new, kernels) == context_frame(old, new, KERNELS[0])
        assert np.array_equal(rebuilt(old, context_frame(old, new, kernels), kernels), new)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.name)
def test_a_step_out_of_range_wraps_alike(kernels: Kernels) -> None:
    old, new = np.full(8, 0x7FF0, np.uint16), np.full(8, 0x7FFF, np.uint16)
    steps, _ = kernels.scan(old, new, np.array([0, 8], np.int64))
    wrong_base = np.array([0x7FFF, 0xFFFF, 0x7FFE, 0x8000, 0, 1, 0xFFF0, 0x7FF5], np.uint16)
    expected = ordered((ordered(wrong_base) + np.int16(15)).view(np.uint16)).view(np.uint16)
    assert np.array_equal(rebuilt(wrong_base, encode_steps(steps, 8), kernels), expected)


def test_sparse_changes_cost_about_their_entropy() -> None:
    rng = np.random.default_rng(3)
    old = bfloat16((rng.standard_normal(1 << 20) * 0.02).astype(np.float32))
    new = old.copy()
    at = np.flatnonzero(rng.random(old.size) < 0.01)
    new[at] = ordered((ordered(old[at]) + rng.choice(np.array([-1, 1], np.int16), at.size)).view(np.uint16)).view(
        np.uint16
    )
    share = at.size / old.size
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) * old.size / 8 + at.size / 8
    frames, _ = encode_segment(old, new, one_piece(old.size), NumpyKernels())
    assert [frame_mode(frame.payload) for frame in frames] == [STEPS]
    assert len(frames[0].payload) < 1.05 * entropy


def test_context_counts_within_classes_and_is_smaller() -> None:
    rng = np.random.default_rng(4)
    old = bfloat16((rng.standard_normal(1 << 19) * np.exp(rng.standard_normal(1 << 19) - 4)).astype(np.float32))
    small = (old & 0x7FFF) < 0x3B80
    new = np.where(small & (rng.random(old.size) < 0.05), old ^ 1, old)
    plain, _ = encode_segment(old, new, one_piece(old.size), NumpyKernels())
    frames, _ = encode_segment(old, new, one_piece(old.size), NumpyKernels(), context=True)
    assert frame_mode(frames[0].payload) == CONTEXT
    assert len(frames[0].payload) < 0.95 * len(plain[0].payload)
    assert np.array_equal(rebuilt(old, frames[0].payload, NumpyKernels()), new)


def test_a_context_frame_on_a_wrong_base_is_refused_untouched() -> None:
    old = np.full(1000, 0x3F80, np.uint16)
    new = old.copy()
    new[900:] += 1
    payload = context_frame(old, new, NumpyKernels())
    base = np.full(1000, 0x3000, np.uint16)
    for kernels in KERNELS:
        with pytest.raises(DeltaCorrupt, match="beyond"):
            apply_frame(payload, base, kernels)
        assert (base == 0x3000).all()


def test_each_tensor_gets_the_mode_that_makes_it_smallest() -> None:
    rng = np.random.default_rng(5)
    size = 80_000
    old = bfloat16((rng.standard_normal(4 * size) * 0.02).astype(np.float32))
    new = old.copy()
    new[:size] = moved(old[:size], 0.5, rng)
    new[size : 2 * size] = rng.integers(0, 1 << 16, size, dtype=np.uint16)
    few = np.flatnonzero(rng.random(size) < 0.3)
    new[2 * size + few] = 0x4242
    pieces = [Piece(n, n * size, (n + 1) * size) for n in range(4)]
    frames, counts = encode_segment(old, new, pieces, NumpyKernels())
    assert [(frame.start // size, frame_mode(frame.payload)) for frame in frames] == [
        (0, STEPS),
        (1, DENSE),
        (2, ABSOLUTE),
    ]
    assert counts[3] == 0
    for frame in frames:
        a, b = old[frame.start : frame.start + frame.count], new[frame.start : frame.start + frame.count]
        steps, _ = NumpyKernels().scan(a, b, np.array([0, a.size], np.int64))
        sizes = [len(encode_steps(steps, a.size)), len(encode_absolute(a, b)), len(encode_dense(b))]
        assert len(frame.payload) == min(sizes)
        assert len(frame.payload) <= b.nbytes + 64


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_other_widths(dtype: type) -> None:
    rng = np.random.default_rng(9)
    old = rng.integers(0, np.iinfo(dtype).max, 50_000, dtype=dtype)
    for share in (0.0, 0.01, 1.0):
        new = np.where(rng.random(old.size) < share, ~old, old)
        frames, counts = encode_segment(old, new, one_piece(old.size), NumpyKernels())
        target = old.copy()
        for frame in frames:
            apply_frame(frame.payload, target, NumpyKernels())
        assert np.array_equal(target, new)
        assert counts == [int((old != new).sum())]
        assert len(frames) == (share > 0)


def test_small_models_do_not_load_numba() -> None:
    assert kernels_for(1 << 20).name == "numpy"


def test_extra_memory_is_bounded() -> None:
    rng = np.random.default_rng(2)
    old = bfloat16((rng.standard_normal(4 << 20) * 0.02).astype(np.float32))
    new = moved(old, 0.01, rng)
    tracemalloc.start()
    frames, _ = encode_segment(old, new, one_piece(old.size), NumpyKernels())
    encode_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    apply_frame(frames[0].payload, old, NumpyKernels())
    decode_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(old, new)
    assert max(encode_peak, decode_peak) < 48 << 20


def sample_frames() -> list[tuple[bytes, U16]]:
    rng = np.random.default_rng(11)
    old = bfloat16((rng.standard_normal(6_000) * 0.02).astype(np.float32))
    new = moved(old, 0.2, rng)
    steps, _ = NumpyKernels().scan(old, new, np.array([0, old.size], np.int64))
    return [(payload, old) for payload in (encode_steps(steps, old.size), encode_absolute(old, new), encode_dense(new))]


def mutated(payload: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(payload)
    kind = rng.integers(0, 6)
    at = int(rng.integers(0, len(data)))
    if kind == 0:
        data[at] ^= 1 << int(rng.integers(0, 8))
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at:at] = rng.bytes(int(rng.integers(1, 9)))
    elif kind == 3:
        near = int(rng.integers(0, min(24, len(data))))
        data[near] = int(rng.integers(0, 256))
    elif kind == 4:
        data[at : at + 8] = struct.pack("<Q", int(rng.integers(0, 1 << 62)))
    else:
        data = bytearray(payload[:2] + rng.bytes(len(payload) // 4))
    return bytes(data)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.name)
def test_damaged_frames_are_refused_untouched_or_change_only_their_target(kernels: Kernels) -> None:
    """2,000 damaged frames: the decoder raises DeltaCorrupt without touching the target, or the damage is such that
    only a digest can tell; nothing else may happen, and memory stays within a multiple of the target."""
    rng = np.random.default_rng(13)
    frames = sample_frames()
    refused = 0
    tracemalloc.start()
    for number in range(2_000):
        payload, old = frames[number % len(frames)]
        room = np.full(old.size + 64, 0xABCD, np.uint16)
        room[32:-32] = old
        try:
            apply_frame(mutated(payload, rng), room[32:-32], kernels)
        except DeltaCorrupt:
            refused += 1
            assert np.array_equal(room[32:-32], old)
        assert (room[:32] == 0xABCD).all()
        assert (room[-32:] == 0xABCD).all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 1_000
    assert peak < 8 << 20


def test_a_bomb_is_refused_before_it_unfolds() -> None:
    bomb = delta_codec._zstd.compressor.compress(bytes(256 << 20))
    number = delta_codec._number
    payload = bytes((DENSE, 1)) + number(100) + number(100) + number(100) + number(len(bomb) * 2 + 1) + bomb
    tracemalloc.start()
    with pytest.raises(DeltaCorrupt, match="not of 100 bytes"):
        apply_frame(payload, np.zeros(100, np.uint8), NumpyKernels())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("mode", [0, 5, 255])
def test_unknown_modes_are_refused(mode: int) -> None:
    with pytest.raises(DeltaCorrupt, match=f"mode {mode}"):
        apply_frame(bytes((mode, 2, 0, 0)), np.zeros(4, np.uint16), NumpyKernels())


@pytest.mark.parametrize(
    ("width", "says", "count"),
    [
        (2, (2, 64), 65),
        (2, (2, 65), 64),
        (4, (2, 64), 64),
        (1, (2, 64), 64),
        (2, (4, 64), 64),
        (8, (8, 64), 64),
        (4, (4, 65), 65),
    ],
)
@pytest.mark.parametrize("mode", ["steps", "context", "absolute", "dense"])
def test_a_frame_of_another_size_or_width_is_refused_untouched(
    mode: str, width: int, says: tuple[int, int], count: int
) -> None:
    """One that says 8 bytes an element fits a mode of values, and no mode of steps."""
    kernels = NumpyKernels()
    old = np.arange(says[1], dtype=f"<u{says[0]}")
    new = old.copy()
    new[[3, 40]] += old.dtype.type(1)
    short, moved_short = old.astype(np.uint16), new.astype(np.uint16)
    payload = {
        "steps": lambda: encode_steps(kernels.scan(short, moved_short, np.array([0, old.size]))[0], old.size),
        "context": lambda: context_frame(short, moved_short, kernels),
        "absolute": lambda: encode_absolute(old, new),
        "dense": lambda: encode_dense(new),
    }[mode]()
    payload = payload[:1] + bytes((says[0],)) + payload[2:]
    target = np.arange(count, dtype=f"<u{width}")
    before = target.copy()
    if (width, count) == says and mode in ("absolute", "dense"):
        apply_frame(payload, target, kernels)
        assert np.array_equal(target, new)
        return
    with pytest.raises(DeltaCorrupt, match="frame is for"):
        apply_frame(payload, target, kernels)
    assert np.array_equal(target, before)


@pytest.mark.parametrize("change", [b"\0", bytes(100), None])
def test_a_frame_is_as_long_as_its_streams(change: bytes | None) -> None:
    payload = encode_dense(np.random.default_rng(0).integers(0, 256, 64).astype(np.uint8))
    target = np.zeros(64, np.uint8)
    with pytest.raises(DeltaCorrupt, match="not as long as its streams"):
        apply_frame(payload[:-1] if change is None else payload + change, target, NumpyKernels())
    assert not target.any()


def framed(mode: int, width: int, numbers: tuple[int, ...], streams: list[tuple[int, bytes, bool]]) -> bytes:
    """A frame as its document says: streams as (length, stored bytes, whether those are a zstd frame)."""
    number = delta_codec._number
    head = [*map(number, numbers), *(number(n) + number(len(body) * 2 + packed) for n, body, packed in streams)]
    return b"".join((bytes((mode, width)), *head, *(body for _, body, _ in streams)))


ZSTD = zstandard.ZstdCompressor().compress


@pytest.mark.parametrize(
    ("length", "body", "packed", "says"),
    [
        (100, bytes(50), False, "stream of 100 bytes is stored in 50"),
        (100, ZSTD(bytes(99)), True, "not of 100 bytes"),
        (100, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100)), True, "not of 100 bytes"),
        (100, ZSTD(bytes(100))[:-2] + b"xx", True, "cannot be read"),
        (100, ZSTD(bytes(100)) + b"xx", True, "cannot be read"),
        (100, ZSTD(bytes(100)) + ZSTD(bytes(100)), True, "cannot be read"),
        (100, b"no frame of zstd", True, "cannot be read"),
        (100, b"", True, "cannot be read"),
        (101, bytes(101), False, "stream 0 of 101 bytes where 100 are possible"),
        (99, bytes(99), False, "stream 0 of 99 bytes where 100 are possible"),
    ],
)
def test_a_stream_is_what_its_lengths_say(length: int, body: bytes, packed: bool, says: str) -> None:
    target = np.ones(100, np.uint8)
    apply_frame(framed(DENSE, 1, (100, 100), [(100, ZSTD(bytes(100)), True)]), target, NumpyKernels())
    assert not target.any()
    with pytest.raises(DeltaCorrupt, match=says):
        apply_frame(framed(DENSE, 1, (100, 100), [(length, body, packed)]), target, NumpyKernels())
    assert not target.any()


def test_escapes_are_whole_values_and_classes_hold_all_changes() -> None:
    gap, far = (1, b"\0", False), [(1, b"\2", False), (1, b"\xff", False)]
    target = np.zeros(8, np.uint16)
    with pytest.raises(DeltaCorrupt, match="half a value"):
        apply_frame(framed(STEPS, 2, (8, 2), [gap, *far, (3, bytes(3), False)]), target, NumpyKernels())
    empty = [(0, b"", False)] * 4
    one = [gap, (1, b"\0", False), (0, b"", False), (0, b"", False)]
    counts = (1,) + (0,) * 15
    for said in (0, 2):
        with pytest.raises(DeltaCorrupt, match=f"classes of a frame have 1 changes of {said}"):
            apply_frame(framed(CONTEXT, 2, (8, said, *counts), one + empty * 15), target, NumpyKernels())
    assert not target.any()
    apply_frame(framed(CONTEXT, 2, (8, 1, *counts), one + empty * 15), target, NumpyKernels())
    assert target.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("stream", range(4))
def test_no_stream_of_steps_is_longer_than_its_frame_can_need(stream: int) -> None:
    """Whatever zstd says of itself: 4 GiB of it are 400 KB."""
    most = (1, 1, 1, 2)
    streams = [(0, b"", False)] * 4
    streams[stream] = (most[stream] + 1, ZSTD(bytes(most[stream] + 1)), True)
    target = np.zeros(8, np.uint16)
    with pytest.raises(DeltaCorrupt, match=f"stream {stream} of {most[stream] + 1} bytes where {most[stream]} are"):
        apply_frame(framed(STEPS, 2, (8, 1), streams), target, NumpyKernels())
    assert not target.any()
