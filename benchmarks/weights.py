"""Weights: bytes of a delta against entropy and against other formats, speed of the codec against a plain copy.

The data are weights shaped like a transformer's under AdamW at learning rates of RL, made with a fixed seed. Times are
thread CPU time, the smallest of several, as ratios against np.copyto of the same array in the same run. Figures without
suffix use the compiled kernels (extra `fast`) where they are installed, those with `_numpy` the plain ones.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks import raw_format as raw
from benchmarks.form import Figure, main, median
from headrace.connectors.stores.local import LocalStore
from headrace.pipeline.delta_to_worker import WeightReader
from headrace.schemas.delta_codec import Frame, apply_frame, encode_segment
from headrace.schemas.delta_layout import Layout, Piece
from headrace.schemas.delta_shard import apply_frames
from headrace.schemas.delta_steps import Kernels, NumpyKernels, changed_positions, kernels_for, ordered
from headrace.trainers.step_to_delta import DeltaPublisher

U16 = NDArray[np.uint16]
SEGMENT = 4 << 20
"""Elements of a segment of 8 MB."""


@dataclass(frozen=True)
class Pair:
    """Two consecutive versions in bfloat16 bits, and the order-0 limit of the change in bytes."""

    old: U16
    new: U16
    share: float
    limit: float


def bfloat16(values: NDArray[np.float32]) -> U16:
    """Round to bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def versions(elements: int, learning_rate: float, seed: int = 7) -> Pair:
    """Weights some 200 AdamW steps after a bfloat16 checkpoint, and one step later.

    Heavy-tailed, scaled by row and column, std about 0.02; the step has the stationary spread of Adam's m / sqrt(v)
    and a small persistent part.
    """
    rng = np.random.default_rng(seed)
    old, new = np.empty(elements, np.uint16), np.empty(elements, np.uint16)
    columns = 1024
    for start in range(0, elements, SEGMENT):
        count = min(SEGMENT, elements - start)
        shape = (count // columns, columns)
        values = rng.standard_normal(shape, np.float32) * np.float32(0.017)
        values /= np.sqrt(rng.standard_exponential(shape, np.float32) * np.float32(0.6) + np.float32(0.4))
        values *= np.exp(0.25 * rng.standard_normal((shape[0], 1), np.float32))
        values *= np.exp(0.25 * rng.standard_normal((1, columns), np.float32))
        values = (bfloat16(values).astype(np.uint32) << 16).view(np.float32)
        values += np.float32(learning_rate * 0.35 * 200**0.5) * rng.standard_normal(shape, np.float32)
        old[start : start + count] = bfloat16(values).reshape(-1)
        step = rng.standard_normal(shape, np.float32) * np.float32(0.23)
        step += rng.standard_normal(shape, np.float32) * np.float32(0.1)
        values -= np.float32(learning_rate) * step
        new[start : start + count] = bfloat16(values).reshape(-1)
    share, limit = order0(old, new)
    return Pair(old, new, share, limit)


def order0(old: U16, new: U16) -> tuple[float, float]:
    """Share of changed elements, and the bytes of positions plus ULP steps at their order-0 entropy."""
    at = changed_positions(old, new)
    share = at.size / old.size
    steps = ordered(new[at]).astype(np.int32) - ordered(old[at])
    counts = np.unique(steps, return_counts=True)[1] / at.size
    places = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) * old.size
    return share, float(places - at.size * (counts * np.log2(counts)).sum()) / 8


def in_turns(calls: dict[str, Callable[[], object]], repeats: int, before: Callable[[], object]) -> dict[str, float]:
    """The smallest thread CPU time of each call; they take turns, so that all see the same machine."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            before()
            start = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def encoded(pair: Pair, kernels: Kernels, *, context: bool = False) -> list[list[Frame]]:
    """All segments of the change as frames."""
    frames = []
    for start in range(0, pair.old.size, SEGMENT):
        old, new = pair.old[start : start + SEGMENT], pair.new[start : start + SEGMENT]
        frames.append(encode_segment(old, new, [Piece(0, 0, old.size)], kernels, context=context)[0])
    return frames


def apply(frames: list[list[Frame]], target: U16, kernels: Kernels, *, hashed: bool) -> None:
    """Apply all segments; with `hashed` every new segment is digested too."""
    for number, segment in enumerate(frames):
        part = target[number * SEGMENT : (number + 1) * SEGMENT]
        if hashed:
            apply_frames(((frame.start, frame.count, frame.payload) for frame in segment), part, kernels)
            continue
        for frame in segment:
            apply_frame(frame.payload, part[frame.start : frame.start + frame.count], kernels)


def codec(pair: Pair, kernels: Kernels, repeats: int, suffix: str) -> Iterator[Figure]:
    """Bytes and speed of the codec with one set of kernels."""
    numpy = suffix == "_numpy"
    target = pair.old.copy()
    frames = encoded(pair, kernels)
    size = sum(len(frame.payload) for segment in frames for frame in segment)
    apply(frames, target, kernels, hashed=False)
    if not np.array_equal(target, pair.new):
        raise AssertionError("the decoded weights are not the encoded ones")

    def restore() -> None:
        np.copyto(target, pair.old)

    xor = len(zstandard.ZstdCompressor(level=1).compress((pair.old ^ pair.new).tobytes()))
    changed = round(pair.share * pair.old.size)
    yield Figure(f"bytes_vs_order0{suffix}", size / pair.limit, "", 1.05, False, "order-0 entropy of places and steps")
    yield Figure(f"bytes_vs_xor_zstd{suffix}", size / xor, "", 0.5, False, "dense XOR, zstd level 1")
    yield Figure(f"bytes_vs_raw{suffix}", size / (6 * changed), "", 0.25, False, "uint32 index + bfloat16 value")
    took = in_turns(
        {
            "copy": restore,
            "encode": lambda: encoded(pair, kernels),
            "apply": lambda: apply(frames, target, kernels, hashed=False),
            "hashed": lambda: apply(frames, target, kernels, hashed=True),
        },
        repeats,
        restore,
    )
    bars = {"encode": 0.12, "apply": 0.25, "hashed": None} if numpy else {"encode": 0.25, "apply": 0.65, "hashed": 0.5}
    names = {"encode": "encode_vs_copy", "apply": "apply_vs_copy", "hashed": "apply_hashed_vs_copy"}
    for kind, name in names.items():
        yield Figure(f"{name}{suffix}", took["copy"] / took[kind], "", bars[kind], True, "np.copyto")


def context_mode(pair: Pair, kernels: Kernels, repeats: int, suffix: str) -> Iterator[Figure]:
    """The same for the mode that counts within classes of the old exponent."""
    target = pair.old.copy()
    frames = encoded(pair, kernels, context=True)
    size = sum(len(frame.payload) for segment in frames for frame in segment)
    apply(frames, target, kernels, hashed=False)
    if not np.array_equal(target, pair.new):
        raise AssertionError("the decoded weights are not the encoded ones")

    def restore() -> None:
        np.copyto(target, pair.old)

    took = in_turns(
        {
            "copy": restore,
            "encode": lambda: encoded(pair, kernels, context=True),
            "apply": lambda: apply(frames, target, kernels, hashed=False),
        },
        repeats,
        restore,
    )
    limit = "order-0 entropy of places and steps"
    yield Figure(f"bytes_vs_order0_context{suffix}", size / pair.limit, "", 0.8, False, limit)
    bar = None if suffix else 0.12
    yield Figure(f"encode_vs_copy_context{suffix}", took["copy"] / took["encode"], "", bar, True, "np.copyto")
    yield Figure(f"apply_vs_copy_context{suffix}", took["copy"] / took["apply"], "", bar, True, "np.copyto")


def raw_format(pair: Pair, ours: int, kernels: Kernels, repeats: int) -> Iterator[Figure]:
    """Side by side with an independent implementation of index + value: bytes, encode, apply."""
    target = pair.old.copy()
    data = raw.encode(pair.old, pair.new)
    raw.apply(data, target)
    if not np.array_equal(target, pair.new):
        raise AssertionError("index + value does not give the new weights")
    frames = encoded(pair, kernels)

    def restore() -> None:
        np.copyto(target, pair.old)

    took = in_turns(
        {
            "raw_encode": lambda: raw.encode(pair.old, pair.new),
            "encode": lambda: encoded(pair, kernels),
            "raw_apply": lambda: raw.apply(data, target),
            "apply": lambda: apply(frames, target, kernels, hashed=False),
            "copy": restore,
        },
        repeats,
        restore,
    )
    other = "independent index + value, same data"
    yield Figure("side_bytes_vs_raw", ours / len(data), "", 0.25, False, other)
    yield Figure("side_encode_vs_raw", took["raw_encode"] / took["encode"], "", anchor=f"{other}: its time / ours")
    yield Figure("side_apply_vs_raw", took["raw_apply"] / took["apply"], "", anchor=f"{other}: its time / ours")
    for kind in ("encode", "apply"):
        yield Figure(f"raw_{kind}_vs_copy", took["copy"] / took[f"raw_{kind}"], "", anchor="np.copyto; index + value")


def critical_path(repeats: int) -> Iterator[Figure]:
    """A publish of 67 MB, and what of it a trainer waits for that publishes beside its next step: a copy."""
    pair = versions(8 * SEGMENT, 1e-6)
    beside: list[float] = []
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        table = Layout.of({"w": pair.old}, {"w": "bfloat16"})
        publisher = DeltaPublisher(LocalStore(Path(folder)), "bench", "main", table, 10_000)
        head = publisher.publish({"w": pair.old}, version=0, lineage=0, batch=0, parent=None)
        for version in range(1, 2 * repeats):
            weights = {"w": pair.new if version % 2 else pair.old}
            start = time.perf_counter()
            kept = {name: bits.copy() for name, bits in weights.items()}
            middle = time.perf_counter()
            head = publisher.publish(kept, version=version, lineage=0, batch=version, parent=head)
            beside.append(1000 * (middle - start))
            alone.append(1000 * (time.perf_counter() - middle))
    yield Figure("publish_ms", median(alone), "ms", anchor="33.5 M weights (67 MB), local store")
    yield Figure("publish_beside_ms", median(beside), "ms", anchor="what the trainer waits for with publish_ahead")


def memory(pair: Pair, kernels: Kernels) -> float:
    """Megabytes that one thread needs beside old and new weights, encoding and applying a segment."""
    old, new = pair.old[:SEGMENT], pair.new[:SEGMENT].copy()
    target = old.copy()
    tracemalloc.start()
    frames, _ = encode_segment(old, new, [Piece(0, 0, old.size)], kernels)
    for frame in frames:
        apply_frame(frame.payload, target[frame.start : frame.start + frame.count], kernels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def small_model(repeats: int) -> Iterator[Figure]:
    """Publish and read of a 0.1 M model of which half the weights change, through a local store: wall milliseconds."""
    rng = np.random.default_rng(3)
    shapes = {f"layers.{n}.{m}": (64, 64) for n in range(2) for m in ("q", "k", "v", "o", "gate", "up", "down")}
    masters = {name: rng.standard_normal(s, np.float32) * np.float32(0.05) for name, s in shapes.items()}
    masters["embed"] = rng.standard_normal((800, 64), np.float32) * np.float32(0.05)
    first = {name: bfloat16(values) for name, values in masters.items()}
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        publisher = DeltaPublisher(store, "bench", "main", Layout.of(first, dict.fromkeys(first, "bfloat16")))
        reader = WeightReader(store, "bench", "main")
        head = publisher.publish(first, version=0, lineage=0, batch=0, parent=None)
        reader.fetch()
        publishing: list[float] = []
        reading: list[float] = []
        for version in range(1, 6 * repeats):
            for values in masters.values():
                values += np.float32(2e-4) * rng.standard_normal(values.shape, np.float32)
            new = {name: bfloat16(values) for name, values in masters.items()}
            start = time.perf_counter()
            head = publisher.publish(new, version=version, lineage=0, batch=version, parent=head)
            middle = time.perf_counter()
            reader.fetch()
            publishing.append(1000 * (middle - start))
            reading.append(1000 * (time.perf_counter() - middle))
        if reader.snapshot().version != head:
            raise AssertionError("the reader is not at the head")
    yield Figure("small_changed_share", head.changed_share, "")
    yield Figure("small_publish_ms", median(publishing), "ms", 10, False, "0.11 M weights, local store")
    yield Figure("small_read_ms", median(reading), "ms", 10, False, "0.11 M weights, local store")


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    elements = (8 if given.quick else 16) * SEGMENT
    repeats = 7 if given.quick else 15
    fast = kernels_for(1 << 40)
    pair = versions(elements, 1e-6)
    yield Figure("changed_share", pair.share, "", anchor="learning rate 1e-6, AdamW")
    yield from codec(pair, fast, repeats, "")
    yield from codec(pair, NumpyKernels(), repeats, "_numpy")
    yield from context_mode(pair, fast, repeats, "")
    yield from context_mode(pair, NumpyKernels(), 2, "_numpy")
    ours = sum(len(frame.payload) for segment in encoded(pair, fast) for frame in segment)
    yield from raw_format(pair, ours, fast, repeats)
    yield Figure("extra_memory_mb", memory(pair, type(fast)()), "MB", 48, False, "one thread, 8 MB segment")
    yield Figure("extra_memory_mb_numpy", memory(pair, NumpyKernels()), "MB", 48, False, "one thread, 8 MB segment")
    for name, rate in (("1e5", 1e-5), ("1e4", 1e-4)):
        other = versions(SEGMENT, rate)
        frames = encoded(other, fast)
        size = sum(len(frame.payload) for segment in frames for frame in segment)
        yield Figure(f"changed_share_lr{name}", other.share, "", anchor=f"learning rate {rate:g}")
        yield Figure(f"bytes_vs_order0_lr{name}", size / other.limit, "", anchor=f"learning rate {rate:g}")
        yield Figure(f"bytes_vs_dense_lr{name}", size / other.new.nbytes, "", anchor="bfloat16 as it is")
    yield from small_model(repeats)
    yield from critical_path(repeats)


if __name__ == "__main__":
    main(__doc__, measure)
