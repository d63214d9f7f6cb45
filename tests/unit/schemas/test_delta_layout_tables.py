"""Layout tables from elsewhere: damaged, contradictory and absurd ones are refused before anything is allocated."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.delta_layout import DeltaCorrupt, Layout, LayoutMismatch

WIDTHS = {"bfloat16": np.uint16, "float32": np.float32, "float8_e4m3fn": np.uint8, "int64": np.int64, "bool": np.bool_}
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def _table() -> dict[str, Any]:
    arrays = {"a": np.zeros((5, 8), np.uint16), "b": np.zeros(3, np.float32), "c": np.zeros(100, np.uint16)}
    layout = Layout.of(arrays, {"a": "bfloat16", "b": "float32", "c": "bfloat16"}, segment_bytes=128)
    table: dict[str, Any] = json.loads(layout.to_bytes())
    return table


def _bytes(table: Any) -> bytes:
    return json.dumps(table).encode()


@given(st.lists(st.tuples(st.sampled_from(sorted(WIDTHS)), SHAPES), max_size=8), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_any_weights_lie_aligned_apart_and_come_back(rows: list[tuple[str, tuple[int, ...]]], lines: int) -> None:
    rng = np.random.default_rng(len(rows))
    arrays = {
        f"t{i}": rng.integers(0, 2 if kind == "bool" else 120, shape).astype(WIDTHS[kind])
        for i, (kind, shape) in enumerate(rows)
    }
    layout = Layout.of(arrays, {f"t{i}": kind for i, (kind, _) in enumerate(rows)}, segment_bytes=64 * lines)
    again = Layout.from_bytes(layout.to_bytes())
    assert (again.tensors, again.segments, again.digest) == (layout.tensors, layout.segments, layout.digest)
    image = layout.image()
    layout.fill(image, arrays)
    for name, view in again.views(image).items():
        assert view.tobytes() == arrays[name].tobytes()
    assert all(tensor.offset % 64 == 0 for tensor in layout.tensors)
    assert sum(segment.nbytes for segment in layout.segments) == layout.nbytes
    covered = [0] * len(rows)
    for segment, pieces in zip(layout.segments, layout.pieces, strict=True):
        assert all(0 <= piece.start < piece.stop <= segment.count for piece in pieces)
        for piece in pieces:
            covered[piece.tensor] += piece.stop - piece.start
    assert covered == [tensor.size for tensor in layout.tensors]


def test_the_digest_tells_names_dtypes_shapes_and_cuts() -> None:
    def digest(name: str = "a", dtype: str = "bfloat16", shape: tuple[int, ...] = (4, 32), cut: int = 128) -> str:
        return Layout.of({name: np.zeros(shape, np.uint16)}, {name: dtype}, segment_bytes=cut).digest

    others = [digest("b"), digest(shape=(32, 4)), digest(shape=(128,)), digest(cut=64)]
    assert digest() == digest()
    assert len({digest(), *others}) == 5
    half = Layout.of({"a": np.zeros((4, 32), np.float16)}, {"a": "float16"}, segment_bytes=128)
    assert half.digest != digest()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format":"headrace-layout/1"}',
        b'{"format":"headrace-layout/1","tensors":[],"segments":[[1e400,64,2]]}',
        b'{"format":"headrace-layout/1","tensors":[["a","bfloat16",[1e400],0]],"segments":[[0,64,2]]}',
        b'{"format":"headrace-layout/1","tensors":[["a","bfloat16",[NaN],0]],"segments":[[0,64,2]]}',
        b'{"format":"headrace-layout/1","tensors":[["a","bfloat16",[4]]],"segments":[[0,64,2]]}',
        b'{"format":"headrace-layout/1","tensors":[["a","bfloat16",4,0]],"segments":[[0,64,2]]}',
        b'{"format":"headrace-layout/2","tensors":[],"segments":[]}',
    ],
)
def test_garbage_is_no_table(data: bytes) -> None:
    with pytest.raises(DeltaCorrupt, match="layout"):
        Layout.from_bytes(data)


def test_a_table_of_absurd_size_is_refused_unread() -> None:
    with pytest.raises(DeltaCorrupt, match="the limit is"):
        Layout.from_bytes(b" " * ((64 << 20) + 1))


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("segments", 0, 0), 64),
        (("segments", 1, 0), 0),
        (("segments", 0, 1), 0),
        (("segments", 0, 1), -64),
        (("segments", 0, 1), 100),
        (("segments", 0, 2), 3),
        (("segments", 0, 2), 0),
        (("tensors", 0, 1), "float128"),
        (("tensors", 0, 1), "float32"),
        (("tensors", 0, 2), [-5, -8]),
        (("tensors", 0, 2), [5, 8, 100]),
        (("tensors", 0, 3), -64),
        (("tensors", 0, 3), 1),
        (("tensors", 1, 3), 0),
        (("tensors", 1, 0), "a"),
        (("tensors", 2, 3), 10**9),
        (("tensors", 0, 2), [10**30]),
        (("tensors", 0, 2), [0, 10**30]),
        (("segments", -1, 1), 1 << 40),
        (("segments", -1, 1), 1 << 70),
    ],
)
def test_tables_that_contradict_themselves_are_refused(where: tuple[str, int, int], value: Any) -> None:
    table = _table()
    assert Layout.from_bytes(_bytes(table)).nbytes > 0
    part, row, column = where
    table[part][row][column] = value
    with pytest.raises(DeltaCorrupt, match="layout table"):
        Layout.from_bytes(_bytes(table))


def test_a_table_with_a_segment_more_or_less_is_refused_or_has_another_digest() -> None:
    table = _table()
    before = Layout.from_bytes(_bytes(table)).digest
    last = table["segments"].pop()
    with pytest.raises(DeltaCorrupt):
        Layout.from_bytes(_bytes(table))
    table["segments"] += [last, [last[0] + last[1], 64, 2]]
    assert Layout.from_bytes(_bytes(table)).digest != before


def test_weights_that_do_not_fit_are_named_and_nothing_is_copied() -> None:
    layout = Layout.from_bytes(_bytes(_table()))
    image = layout.image()
    good = {"a": np.ones((5, 8), np.uint16), "b": np.ones(3, np.float32), "c": np.ones(100, np.uint16)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({k: v for k, v in good.items() if k != "c"}, "different tensors: c"),
        ({**good, "d": good["a"]}, "different tensors: d"),
        ({**good, "c": np.ones(99, np.uint16)}, r"c is bfloat16 \[100\] in the layout but comes as uint16 \[99\]"),
        ({**good, "c": np.ones(100, np.float32)}, "comes as float32"),
        ({**good, "a": np.ones((8, 5), np.uint16)}, r"\[8, 5\]"),
    ]
    for weights, says in cases:
        with pytest.raises(LayoutMismatch, match=says):
            layout.fill(image, weights)
        assert not image.any()
    layout.fill(image, good)
    with pytest.raises(LayoutMismatch, match="image of 64 bytes"):
        layout.views(np.zeros(64, np.uint8))


@pytest.mark.parametrize(
    ("arrays", "dtypes", "cut", "says"),
    [
        ({"a": np.zeros(4, np.uint16)}, {"a": "bfloat16"}, 0, "segment_bytes is 0"),
        ({"a": np.zeros(4, np.uint16)}, {"a": "bfloat16"}, 100, "positive multiple of 64"),
        ({"a": np.zeros(4, np.uint16)}, {"a": "bfloat16"}, (1 << 31) + 64, "at most 2147483648"),
        ({"a": np.zeros(4, np.uint16)}, {"b": "bfloat16"}, 64, "different tensors: a, b"),
        ({"a": np.zeros(4, np.uint16)}, {"a": "complex64"}, 64, "dtype 'complex64'; known are bfloat16"),
        ({"a": np.zeros(4, np.float32)}, {"a": "bfloat16"}, 64, "2 bytes an element. but comes as float32"),
    ],
)
def test_weights_without_a_layout_say_why(arrays: dict[str, Any], dtypes: dict[str, str], cut: int, says: str) -> None:
    with pytest.raises(LayoutMismatch, match=says):
        Layout.of(arrays, dtypes, segment_bytes=cut)


def test_a_view_of_the_image_is_no_copy_and_a_transposed_array_is_taken_by_value() -> None:
    source = np.arange(12, dtype=np.uint16).reshape(3, 4)
    layout = Layout.of({"w": source.T}, {"w": "bfloat16"})
    image = layout.image()
    layout.fill(image, {"w": np.ascontiguousarray(source.T)})
    layout.views(image)["w"][0, 0] = 77
    assert layout.elements(image, layout.segments[0])[0] == 77
    assert layout.views(image)["w"].tolist()[1] == source.T.tolist()[1]
