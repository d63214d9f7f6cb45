"""The torch encoder gives the bytes of the numpy one, on every kind of bits."""

import numpy as np
import pytest
import torch

from headrace.schemas.delta_codec import apply_frame, encode_segment
from headrace.schemas.delta_layout import Piece
from headrace.schemas.delta_steps import NumpyKernels
from headrace.trainers.torch_kernels import TorchKernels, kernels_on

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pair(count: int, share: float, seed: int, *, wild: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = (rng.standard_normal(count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    at = rng.random(count) < share
    moves = rng.integers(0, 1 << 16, int(at.sum())) if wild else rng.choice([1, 0xFFFF, 2, 300, 40], int(at.sum()))
    new[at] += moves.astype(np.uint16)
    return old, new


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("count", "share"), [(0, 0.5), (1, 1.0), (5, 0.0), (7, 1.0), (4096, 0.001), (90_001, 0.05)])
@pytest.mark.parametrize("wild", [False, True], ids=["steps", "any bits"])
def test_streams_and_counts_are_those_of_numpy(device: str, count: int, share: float, wild: bool) -> None:
    old, new = pair(count, share, count, wild=wild)
    old.flags.writeable = False
    bounds = np.unique(np.array([0, count // 3, count // 2, count], np.int64))
    bounds = bounds if bounds.size > 1 else np.array([0, count], np.int64)
    wanted, counts = NumpyKernels().scan(old, new, bounds)
    found, here = TorchKernels(torch.device(device)).scan(old, new, bounds)
    assert here.tolist() == counts.tolist()
    assert found.changed == wanted.changed
    for name in ("gaps", "codes", "magnitudes", "escapes"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert (mine.dtype, mine.tobytes()) == (theirs.dtype, theirs.tobytes()), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("context", [False, True], ids=["steps", "context"])
def test_whole_frames_are_those_of_numpy_and_can_be_applied(device: str, context: bool) -> None:
    old, new = pair(200_000, 0.04, 3, wild=False)
    pieces = [Piece(0, 0, 70_000), Piece(1, 70_016, 200_000)]
    numpy, torch_ = NumpyKernels(), TorchKernels(torch.device(device))
    wanted = encode_segment(old, new, pieces, numpy, context=context)
    found = encode_segment(old, new, pieces, torch_, context=context)
    assert found == wanted
    target = old.copy()
    for frame in found[0]:
        apply_frame(frame.payload, target[frame.start : frame.start + frame.count], torch_)
    assert np.array_equal(target, new)


def test_a_cpu_keeps_its_own_kernels() -> None:
    assert kernels_on(torch.device("cpu")) is None
    assert isinstance(kernels_on(torch.device("cuda")), TorchKernels)
