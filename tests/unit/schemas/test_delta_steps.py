"""The streams of the step mode, to the byte: what is documented is what is written, and nothing else is accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from headrace.schemas.delta_context import apply_classes, steps_by_class
from headrace.schemas.delta_layout import DeltaCorrupt
from headrace.schemas.delta_steps import (
    CLASSES,
    Kernels,
    NumpyKernels,
    Steps,
    changed_positions,
    check_gaps,
    check_steps,
    classes_of,
    gaps_of,
    moved,
    ordered,
    positions_of,
    steps_of,
)

U16 = NDArray[np.uint16]
BITS = arrays(np.uint16, st.integers(1, 60), elements=st.integers(0, 0xFFFF))


def all_kernels() -> list[Kernels]:
    try:
        from headrace.schemas.delta_fast import NumbaKernels
    except ImportError:
        return [NumpyKernels()]
    return [NumpyKernels(), NumbaKernels()]


KERNELS = all_kernels()
each_kernel = pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.name)


def _u16(*values: int) -> U16:
    return np.array(values, np.uint16)


def _u8(*values: int) -> NDArray[np.uint8]:
    return np.array(values, np.uint8)


def _scan(old: U16, new: U16, kernels: Kernels | None = None) -> Steps:
    return (kernels or NumpyKernels()).scan(old, new, np.array([0, old.size], np.int64))[0]


@pytest.mark.parametrize(
    ("positions", "stream"),
    [
        ([], b""),
        ([0], b"\0"),
        ([0, 1, 2], b"\0\0\0"),
        ([254], b"\xfe"),
        ([255], b"\xff\0"),
        ([256], b"\xff\1"),
        ([510], b"\xff\xff\0"),
        ([3, 3 + 1 + 254], b"\3\xfe"),
        ([3, 3 + 1 + 255], b"\3\xff\0"),
        ([0, 1 + 2 * 255 + 7], b"\0\xff\xff\7"),
    ],
)
def test_the_gap_stream_is_as_documented(positions: list[int], stream: bytes) -> None:
    assert gaps_of(np.array(positions, np.int64)).tobytes() == stream
    assert positions_of(np.frombuffer(stream, np.uint8)).tolist() == positions


@each_kernel
@pytest.mark.parametrize(
    ("old", "new", "code", "magnitudes", "escapes"),
    [
        ((0x3F80,), (0x3F81,), 0b00, [], []),
        ((0x3F81,), (0x3F80,), 0b01, [], []),
        ((0x3F80,), (0x3F82,), 0b10, [0], []),
        ((0x3F82,), (0x3F80,), 0b11, [0], []),
        ((0x3F80,), (0x3F80 + 256,), 0b10, [254], []),
        ((0x3F80,), (0x3F80 + 257,), 0b10, [255], [0x3F80 + 257]),
        ((0x0000,), (0x8000,), 0b01, [], []),
        ((0x8000,), (0x0000,), 0b00, [], []),
        ((0x8001,), (0x0001,), 0b10, [1], []),
        ((0x0000,), (0xFFFF,), 0b11, [255], [0xFFFF]),
        ((0xFFFF,), (0x7FFF,), 0b10, [255], [0x7FFF]),
    ],
    ids=["up", "down", "two up", "two down", "most", "beyond", "zero to -0", "-0 to zero", "across", "to NaN", "NaNs"],
)
def test_one_change_in_bytes(
    kernels: Kernels,
    old: tuple[int, ...],
    new: tuple[int, ...],
    code: int,
    magnitudes: list[int],
    escapes: list[int],
) -> None:
    steps = _scan(_u16(*old), _u16(*new), kernels)
    assert (steps.changed, steps.gaps.tolist(), steps.codes.tolist()) == (1, [0], [code])
    assert steps.magnitudes.tolist() == magnitudes
    assert steps.escapes.tolist() == escapes
    target = _u16(*old)
    kernels.apply(steps, target)
    assert target.tolist() == list(new)


def test_codes_lie_four_to_a_byte_lowest_bits_first() -> None:
    old = np.full(6, 0x3F80, np.uint16)
    new = _u16(0x3F81, 0x3F7F, 0x3F83, 0x3F7D, 0x3F7F, 0x3F81)
    steps = _scan(old, new)
    assert steps.codes.tolist() == [0b11_10_01_00, 0b00_01]
    assert steps.magnitudes.tolist() == [1, 1]


@given(BITS, st.data())
@settings(max_examples=100, deadline=None)
def test_the_streams_pass_their_own_check_and_lead_back(old: U16, data: st.DataObject) -> None:
    new = data.draw(arrays(np.uint16, old.size, elements=st.integers(0, 0xFFFF)))
    positions = changed_positions(old, new)
    assert positions.tolist() == [i for i in range(old.size) if old[i] != new[i]]
    steps = steps_of(gaps_of(positions), old[positions], new[positions])
    check_steps(steps, old.size)
    assert np.array_equal(moved(old[positions], steps), new[positions])
    assert steps.escapes.size == sum(abs(int(ordered(new[i : i + 1])[0]) - int(ordered(old[i : i + 1])[0])) > 256
                                     for i in positions)  # fmt: skip


def test_positions_are_found_across_the_chunks_of_the_search() -> None:
    old = np.zeros((1 << 20) + 70, np.uint16)
    new = old.copy()
    at = [0, (1 << 20) - 1, 1 << 20, (1 << 20) + 69]
    new[at] = 1
    for kernels in KERNELS:
        steps, counts = kernels.scan(old, new, np.array([0, 1 << 20, old.size], np.int64))
        assert positions_of(steps.gaps).tolist() == at
        assert counts.tolist() == [2, 2]
    assert changed_positions(old, new).tolist() == at


@each_kernel
def test_every_run_is_looked_at_once_in_order_with_its_new_values(kernels: Kernels) -> None:
    run = 1 << 18
    rng = np.random.default_rng(0)
    old = rng.integers(0x3F00, 0x3FFF, 3 * run + 77, np.uint16)
    new = old.copy()
    # Both sides of every border, a change after more than a run of none, and every kind of step.
    at = [0, run - 256, run - 2, run - 1, run, run + 254, 3 * run - 1, 3 * run, 3 * run + 76]
    new[at] = old[at] + np.array([1, 65535, 2, 300, 65534, 1, 65036, 7, 1], np.uint16)
    target, seen = old.copy(), list[U16]()
    kernels.apply(_scan(old, new, kernels), target, lambda elements: seen.append(elements.copy()))
    assert np.array_equal(target, new)
    assert np.array_equal(np.concatenate(seen), new)


@each_kernel
def test_nothing_changed_gives_empty_streams_and_changes_nothing(kernels: Kernels) -> None:
    for size in (0, 1, 1000):
        bits = np.arange(size, dtype=np.uint16)
        steps = _scan(bits, bits.copy(), kernels)
        assert [s.size for s in (steps.gaps, steps.codes, steps.magnitudes, steps.escapes)] == [0, 0, 0, 0]
        check_steps(steps, size)
        target = bits.copy()
        kernels.apply(steps, target)
        assert np.array_equal(target, bits)


@pytest.mark.parametrize(
    ("gaps", "changed", "count", "says"),
    [
        ([0], 2, 10, "names 1 positions, the frame says 2"),
        ([0, 0], 1, 10, "names 2 positions"),
        ([255], 0, 300, "names 0 positions"),
        ([3, 255], 1, 300, "names 1 positions"),
        ([10], 1, 10, "beyond the frame's 10 elements"),
        ([4, 5], 2, 10, "beyond the frame's 10 elements"),
        ([255, 0], 1, 255, "beyond the frame's 255 elements"),
    ],
)
def test_gap_streams_that_name_other_positions_are_refused(
    gaps: list[int], changed: int, count: int, says: str
) -> None:
    with pytest.raises(DeltaCorrupt, match=says):
        check_gaps(_u8(*gaps), changed, count)


@pytest.mark.parametrize(("gaps", "count"), [([9], 10), ([4, 4], 10), ([255, 0], 256), ([], 0)])
def test_gap_streams_that_end_at_the_last_element_pass(gaps: list[int], count: int) -> None:
    check_gaps(_u8(*gaps), sum(gap != 255 for gap in gaps), count)


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"codes": _u8()}, "code stream has 0 bytes for 3 changes"),
        ({"codes": _u8(0b10, 0)}, "code stream has 2 bytes for 3 changes"),
        ({"codes": _u8(0b01_00_00_10)}, "bits after its end"),
        ({"codes": _u8(0b00_00_00)}, "code and magnitude streams disagree"),
        ({"codes": _u8(0b10_10)}, "code and magnitude streams disagree"),
        ({"magnitudes": _u8(255)}, "magnitude and escape streams disagree"),
        ({"escapes": _u16(7)}, "magnitude and escape streams disagree"),
        ({"changed": 4}, "names 3 positions, the frame says 4"),
    ],
)
def test_streams_that_do_not_fit_each_other_are_refused(over: dict[str, object], says: str) -> None:
    sound = Steps(3, _u8(0, 1, 2), _u8(0b10), _u8(7), _u16())
    check_steps(sound, 10)
    with pytest.raises(DeltaCorrupt, match=says):
        check_steps(replace(sound, **over), 10)  # type: ignore[arg-type]


def test_a_class_is_the_exponent_of_the_old_value_within_bounds() -> None:
    exponents = np.arange(256, dtype=np.uint16)
    expected = [min(max(int(e) - 111, 0), 13) for e in exponents]
    for sign in (0, 0x8000):
        for mantissa in (0, 0x7F):
            bits = (exponents << np.uint16(7)) | np.uint16(sign | mantissa)
            assert classes_of(bits).tolist() == expected
    assert max(expected) < CLASSES


@each_kernel
@given(old=BITS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_places_are_the_inverse_of_ranks_within_every_class(kernels: Kernels, old: U16, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, old.size - 1)))
    new = old.copy()
    new[sorted(chosen)] ^= np.uint16(data.draw(st.integers(1, 0xFFFF)))
    positions, ranks = kernels.find(old, new)
    assert positions.tolist() == sorted(chosen)
    classes = classes_of(old)
    for position, rank in zip(positions, ranks, strict=True):
        assert rank == int((classes[:position] == classes[position]).sum())
    by_class = [ranks[classes[positions] == one] for one in range(CLASSES)]
    places = kernels.places(old, by_class)
    assert sorted(int(p) for one in places for p in one) == sorted(chosen)
    assert all((classes[here] == one).all() for one, here in enumerate(places))


@each_kernel
def test_a_rank_beyond_its_class_names_the_class(kernels: Kernels) -> None:
    bits = np.full(5, 0x3F80, np.uint16)
    one = int(classes_of(bits)[0])
    ranks = [np.empty(0, np.int64) for _ in range(CLASSES)]
    ranks[one] = np.array([0, 4], np.int64)
    assert kernels.places(bits, ranks)[one].tolist() == [0, 4]
    ranks[one] = np.array([5], np.int64)
    with pytest.raises(DeltaCorrupt, match=f"class {one} goes beyond its elements: the frame was made on another base"):
        kernels.places(bits, ranks)


@each_kernel
@given(old=BITS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_steps_by_class_lead_from_old_to_new(kernels: Kernels, old: U16, data: st.DataObject) -> None:
    new = data.draw(arrays(np.uint16, old.size, elements=st.integers(0, 0xFFFF)))
    steps, positions = steps_by_class(old, new, kernels)
    assert positions.tolist() == changed_positions(old, new).tolist()
    assert len(steps) == CLASSES
    assert sum(one.changed for one in steps) == int((old != new).sum())
    target = old.copy()
    apply_classes(steps, target, kernels)
    assert np.array_equal(target, new)


@each_kernel
def test_a_broken_class_leaves_the_target_as_it_was(kernels: Kernels) -> None:
    old = np.array([0x3F80, 0x3000, 0x3F80, 0x4000], np.uint16)
    steps, _ = steps_by_class(old, old + np.uint16(1), kernels)
    target = old.copy()
    with pytest.raises(DeltaCorrupt, match="15 classes of 16"):
        apply_classes(steps[:-1], target, kernels)
    last = max(i for i, one in enumerate(steps) if one.changed)
    broken = [*steps]
    broken[last] = replace(steps[last], codes=_u8())
    with pytest.raises(DeltaCorrupt, match="code stream"):
        apply_classes(broken, target, kernels)
    assert np.array_equal(target, old)
