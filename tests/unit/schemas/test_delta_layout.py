"""The layout table: offsets, segments, pieces, digests, and what it refuses."""

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.schemas.delta_layout import DeltaCorrupt, Layout, LayoutMismatch


def weights() -> tuple[dict[str, NDArray[np.generic]], dict[str, str]]:
    arrays: dict[str, NDArray[np.generic]] = {
        "embed": np.arange(300, dtype=np.uint16).reshape(30, 10),
        "norm": np.linspace(0, 1, 7, dtype=np.float32),
        "q": np.arange(1000, 1129, dtype=np.uint16),
        "steps": np.array(5, np.int64),
        "mask": np.array([True, False]),
        "nothing": np.zeros((0, 4), np.uint16),
    }
    dtypes = dict.fromkeys(arrays, "bfloat16") | {"norm": "float32", "steps": "int64", "mask": "bool"}
    return arrays, dtypes


def test_every_element_comes_back() -> None:
    arrays, dtypes = weights()
    layout = Layout.of(arrays, dtypes, segment_bytes=128)
    image = layout.image()
    layout.fill(image, arrays)
    views = layout.views(image)
    assert list(views) == [t.name for t in layout.tensors]
    for name, array in arrays.items():
        assert views[name].shape == array.shape
        assert views[name].dtype == array.dtype
        assert np.array_equal(views[name], array), name


def test_widths_never_mix_in_a_segment_and_pieces_tile_the_tensors() -> None:
    arrays, dtypes = weights()
    layout = Layout.of(arrays, dtypes, segment_bytes=128)
    seen = [0] * len(layout.tensors)
    assert len(layout.pieces) == len(layout.segments)
    for segment, pieces in zip(layout.segments, layout.pieces, strict=True):
        assert segment.nbytes % segment.width == 0
        assert segment.nbytes <= 128
        for piece in pieces:
            assert layout.tensors[piece.tensor].width == segment.width
            assert 0 <= piece.start < piece.stop <= segment.count
            seen[piece.tensor] += piece.stop - piece.start
    assert seen == [tensor.size for tensor in layout.tensors]
    assert layout.segments[0].offset == 0
    assert all(a.offset + a.nbytes == b.offset for a, b in zip(layout.segments, layout.segments[1:], strict=False))


def test_equal_tables_have_equal_digests_and_others_do_not() -> None:
    arrays, dtypes = weights()
    layout = Layout.of(arrays, dtypes)
    again = Layout.from_bytes(layout.to_bytes())
    assert again.digest == layout.digest
    assert again.tensors == layout.tensors
    assert again.segments == layout.segments
    assert Layout.of(arrays, dtypes, segment_bytes=64).digest != layout.digest
    assert Layout.of(arrays, dtypes | {"embed": "float16"}).digest != layout.digest
    assert Layout.of(dict(reversed(arrays.items())), dtypes).digest != layout.digest
    assert len(layout.digest) == 32


def test_a_model_of_many_sizes_covers_every_segment_once() -> None:
    rng = np.random.default_rng(1)
    arrays = {f"t{n}": np.zeros(int(rng.integers(1, 5000)), np.uint16) for n in range(60)}
    layout = Layout.of(arrays, dict.fromkeys(arrays, "bfloat16"), segment_bytes=4096)
    marks = np.zeros(layout.nbytes // 2, np.int64)
    for segment, pieces in zip(layout.segments, layout.pieces, strict=True):
        for piece in pieces:
            marks[segment.offset // 2 + piece.start : segment.offset // 2 + piece.stop] += 1
    assert marks.max() == 1
    assert marks.sum() == sum(a.size for a in arrays.values())


def test_weights_that_do_not_fit_are_refused_before_a_byte_is_copied() -> None:
    arrays, dtypes = weights()
    layout = Layout.of(arrays, dtypes)
    image = layout.image()
    cases = [
        (arrays | {"extra": arrays["q"]}, "extra"),
        ({k: v for k, v in arrays.items() if k != "q"}, "q"),
        (arrays | {"q": arrays["q"][:-1]}, "tensor q"),
        (arrays | {"norm": arrays["norm"].astype(np.float64)}, "tensor norm"),
    ]
    for wrong, message in cases:
        with pytest.raises(LayoutMismatch, match=message):
            layout.fill(image, wrong)
    assert not image.any()
    with pytest.raises(LayoutMismatch, match="dtype 'complex64'"):
        Layout.of(arrays, dtypes | {"q": "complex64"})
    with pytest.raises(LayoutMismatch, match="comes as uint16"):
        Layout.of(arrays, dtypes | {"q": "float32"})
    with pytest.raises(LayoutMismatch, match="different tensors: q"):
        Layout.of(arrays, {k: v for k, v in dtypes.items() if k != "q"})


def test_non_contiguous_weights_are_taken() -> None:
    base = np.arange(64, dtype=np.uint16).reshape(8, 8)
    layout = Layout.of({"t": base.T}, {"t": "bfloat16"})
    image = layout.image()
    layout.fill(image, {"t": base.T})
    assert np.array_equal(layout.views(image)["t"], base.T)


def broken(change: dict[str, object]) -> bytes:
    arrays, dtypes = weights()
    table = json.loads(Layout.of(arrays, dtypes, segment_bytes=128).to_bytes())
    return json.dumps(table | change).encode()


@pytest.mark.parametrize(
    "change",
    [
        {"format": "headrace-layout/9"},
        {"segments": [[0, 128, 2], [192, 128, 2]]},
        {"segments": [[0, 0, 2]]},
        {"segments": [[0, 64, 3]]},
        {"tensors": [["a", "bfloat16", [10], 32]]},
        {"tensors": [["a", "bfloat16", [10**9], 0]]},
        {"tensors": [["a", "bfloat16", [-1], 0]]},
        {"tensors": [["a", "float32", [4], 0]]},
        {"tensors": [["a", "bfloat16", [4], 0], ["a", "bfloat16", [4], 64]]},
        {"tensors": [["a", "bfloat16", [64], 0], ["b", "bfloat16", [4], 64]]},
        {"tensors": [["a", "who", [4], 0]]},
        {"tensors": "x"},
        {"segments": None},
    ],
)
def test_a_broken_table_is_corrupt(change: dict[str, object]) -> None:
    with pytest.raises(DeltaCorrupt, match="layout"):
        Layout.from_bytes(broken(change))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b"null", b'{"format":"headrace-layout/1"}'])
def test_garbage_is_corrupt(data: bytes) -> None:
    with pytest.raises(DeltaCorrupt):
        Layout.from_bytes(data)
