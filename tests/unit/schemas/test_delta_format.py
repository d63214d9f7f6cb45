"""The byte formats as their documents say them: a reader that uses nothing of headrace gets the published weights.

Written from the docstrings of ``schemas/delta_manifest``, ``delta_layout``, ``delta_shard``, ``delta_codec``,
``delta_steps`` and ``delta_context`` alone: what it cannot read, their readers could not either.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from headrace.connectors.stores.local import LocalStore
from headrace.schemas.delta_layout import Layout
from headrace.trainers.step_to_delta import DeltaPublisher

POLICY = "runs/first/main"
DTYPES = {
    "norm": "float32", "embed": "bfloat16", "head": "bfloat16", "mask": "bool", "steps": "int64", "none": "bfloat16",
}  # fmt: skip


class ForeignReader:
    """Follows a chain in a folder with struct, json, numpy, zstandard and xxhash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modes: set[int] = set()

    def weights(self, version: int) -> dict[str, bytes]:
        """The raw bits of every tensor of a version."""
        manifest = self.manifest(version)
        layout = json.loads((self.folder / POLICY / "layout" / manifest["layout_digest"]).read_bytes())
        image = self.image(manifest, layout)
        width = {"float32": 4, "bfloat16": 2, "bool": 1, "int64": 8}
        return {
            name: image[offset : offset + int(np.prod(shape)) * width[dtype]].tobytes()
            for name, dtype, shape, offset in layout["tensors"]
        }

    def manifest(self, version: int) -> dict[str, Any]:
        file = json.loads((self.folder / POLICY / f"manifest/{version:012d}.json").read_bytes())
        canonical = json.dumps(file["body"], sort_keys=True, separators=(",", ":")).encode()
        assert hashlib.sha256(canonical).hexdigest() == file["sha256"]
        body: dict[str, Any] = file["body"]
        assert (body["format"], body["codec"]) == ("headrace-manifest/1", "headrace-delta/1")
        return body

    def image(self, manifest: dict[str, Any], layout: dict[str, Any]) -> np.ndarray:
        if manifest["delta"]:
            image, refs = self.image(self.manifest(manifest["parent"]), layout), manifest["delta"]
        else:
            last = layout["segments"][-1]
            image, refs = np.zeros(last[0] + last[1], np.uint8), manifest["full"]
        for key, nbytes, head, digest in refs:
            data = (self.folder / key).read_bytes()
            assert len(data) == nbytes
            assert xxhash.xxh3_128_hexdigest(data[:head]) == digest
            self.apply(data, image, layout, manifest)
        digests = [xxhash.xxh3_128_digest(image[at : at + nbytes].data) for at, nbytes, _ in layout["segments"]]
        assert xxhash.xxh3_128_hexdigest(b"".join(digests)) == manifest["root_digest"]
        return image

    def apply(self, data: bytes, image: np.ndarray, layout: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Apply one object."""
        magic, form, kind, _, _, segments, frames, version, parent, digest, nbytes = struct.unpack_from(
            "<4sHHIIIIqq16sQ", data
        )
        assert (magic, form, kind, version) == (b"HRWS", 1, int(bool(manifest["delta"])), manifest["version"])
        assert (parent, digest.hex(), nbytes) == (
            manifest["parent"] if kind else -1, manifest["layout_digest"], len(data),
        )  # fmt: skip
        row, at = 64 + 24 * segments, 64 + 24 * segments + 32 * frames
        for place in range(segments):
            index, count, new = struct.unpack_from("<II16s", data, 64 + 24 * place)
            offset, size, width = layout["segments"][index]
            target = image[offset : offset + size].view(f"<u{width}")
            for _ in range(count):
                start, elements, length, _, digest = struct.unpack_from("<IIII16s", data, row)
                payload = data[at : at + length]
                assert xxhash.xxh3_128_digest(payload) == digest
                self.frame(payload, target[start : start + elements])
                row, at = row + 32, at + length
            assert xxhash.xxh3_128_digest(target.view(np.uint8).data) == new
        assert at == len(data)

    def frame(self, payload: bytes, target: np.ndarray) -> None:
        mode, width = payload[0], payload[1]
        self.modes.add(mode)
        numbers = leb128(payload, 2)
        assert (width, next(numbers)[0]) == (target.itemsize, target.size)
        changed = [next(numbers)[0]]
        if mode == 4:
            total = changed[0]
            changed = [next(numbers)[0] for _ in range(16)]
            assert sum(changed) == total
        streams = {1: 4, 2: 1 + width, 3: width, 4: 64}[mode]
        lengths = [(next(numbers)[0], next(numbers)) for _ in range(streams)]
        at = lengths[-1][1][1]
        raw: list[np.ndarray] = []
        for length, (stored, _) in lengths:
            body = payload[at : at + stored // 2]
            raw.append(np.frombuffer(zstandard.decompress(body) if stored % 2 else body, np.uint8))
            assert raw[-1].size == length
            at += stored // 2
        assert at == len(payload)
        if mode == 3:
            target[:] = joined(raw, width)
        elif mode == 2:
            target[positions(raw[0])] = joined(raw[1:], width)
        elif mode == 1:
            steps(target, np.arange(target.size), changed[0], raw)
        else:
            classes = np.clip((target >> 7 & 0xFF).astype(int) - 111, 0, 13)
            members = [np.flatnonzero(classes == number) for number in range(16)]
            for number in range(16):
                steps(target, members[number], changed[number], raw[4 * number :])


def leb128(data: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Number after number, and where each ends."""
    while True:
        value, place = 0, 0
        while True:
            value |= (data[at] & 127) << 7 * place
            at, place = at + 1, place + 1
            if data[at - 1] < 128:
                break
        yield value, at


def positions(gaps: np.ndarray) -> list[int]:
    found, at = [], 0
    for gap in gaps.tolist():
        at += gap
        if gap < 255:
            found.append(at)
            at += 1
    return found


def joined(planes: list[np.ndarray], width: int) -> np.ndarray:
    return np.stack(planes, axis=1).copy().view(f"<u{width}").reshape(-1)


def steps(target: np.ndarray, members: np.ndarray, changed: int, streams: list[np.ndarray]) -> None:
    gaps, codes, magnitudes, escapes = streams[:4]
    far, new = iter(magnitudes.tolist()), iter(escapes.view("<u2").tolist())
    where = members[positions(gaps)]
    assert len(where) == changed
    for number, position in enumerate(where):
        code = int(codes[number // 4]) >> 2 * (number % 4) & 3
        more = next(far) if code & 2 else -1
        if more == 255:
            target[position] = next(new)
            continue
        bits = int(target[position])
        signed = bits if bits < 0x8000 else -(bits - 0x8000) - 1
        signed += (more + 2) * (-1 if code & 1 else 1)
        target[position] = signed if signed >= 0 else 0x8000 - signed - 1
    assert (next(far, None), next(new, None)) == (None, None)


def first(rng: np.random.Generator) -> dict[str, np.ndarray]:
    spread = (rng.standard_normal(30_000) * np.exp(rng.standard_normal(30_000) * 3)).astype(np.float32)
    return {
        "norm": rng.standard_normal(40).astype(np.float32),
        "embed": (spread.view(np.uint32) >> 16).astype(np.uint16).reshape(100, 300),
        "head": rng.integers(0, 1 << 16, (7, 11), np.uint16),
        "mask": rng.random(130) < 0.5,
        "steps": np.array(1 << 40, np.int64),
        "none": np.zeros((0, 3), np.uint16),
    }


def changed(weights: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights after a step: small steps, large ones, signs, NaN and -0.0; a few values of the other tensors."""
    new = {name: array.copy() for name, array in weights.items()}
    embed = new["embed"].reshape(-1)
    where = rng.choice(embed.size, 5000, replace=False)
    embed[where] += rng.integers(1, 4, where.size, np.uint16)
    embed[where[:20]] ^= np.uint16(0x8000)
    embed[where[20:24]] = (0x7FC1, 0xFF80, 0x8000, 0x0000)
    new["norm"][3] = -0.0
    new["mask"][::2] ^= True
    new["head"] += np.uint16(1)
    new["steps"] += 1
    return new


@pytest.mark.parametrize("context", [False, True])
def test_a_reader_made_from_the_documents_gets_the_published_weights(tmp_path: Path, context: bool) -> None:
    rng = np.random.default_rng(7)
    weights = first(rng)
    layout = Layout.of(weights, DTYPES, segment_bytes=64 << 10)
    publisher = DeltaPublisher(LocalStore(tmp_path), "first", "main", layout, full_every=3, context=context)
    parent, published = None, []
    for version in range(5):
        parent = publisher.publish(weights, version=version, lineage=0, batch=version, parent=parent)
        published.append({name: array.tobytes() for name, array in weights.items()})
        weights = changed(weights, rng)
    reader = ForeignReader(tmp_path)
    for version in (0, 2, 4):
        assert reader.weights(version) == published[version]
    assert reader.modes >= ({2, 3, 4} if context else {1, 2, 3})
