"""The shard object and the manifest: what is packed is read, and anything damaged is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.schemas.delta_codec import Frame, encode_absolute, encode_dense, encode_steps
from headrace.schemas.delta_layout import DeltaCorrupt, Layout
from headrace.schemas.delta_manifest import DeltaKeys, ShardRef, WeightManifest
from headrace.schemas.delta_shard import (
    DELTA,
    FULL,
    SegmentFrames,
    apply_frames,
    digest_of,
    head_length,
    pack_shard,
    root_of,
    unpack_head,
)
from headrace.schemas.delta_steps import NumpyKernels

KEYS = DeltaKeys("first", "main")
LAYOUT = Layout.of({"w": np.zeros(200, np.uint16)}, {"w": "bfloat16"}, segment_bytes=192)


def frames_of(segment: int, data: NDArray[np.uint16]) -> SegmentFrames:
    return SegmentFrames(segment, digest_of(data), (Frame(0, data.size, encode_dense(data)),))


def full_shard() -> tuple[bytes, int]:
    rows = [frames_of(s.index, np.full(s.count, s.index, np.uint16)) for s in LAYOUT.segments]
    return pack_shard(FULL, 3, -1, LAYOUT, rows)


def test_a_head_tells_where_every_frame_is() -> None:
    body, length = full_shard()
    assert head_length(body) == length
    head = unpack_head(memoryview(body)[:length], LAYOUT)
    assert (head.kind, head.version, head.parent, head.nbytes) == (FULL, 3, -1, len(body))
    assert (head.rank, head.ranks) == (0, 1)
    assert [row.index for row in head.segments] == [0, 1, 2]
    for row in head.segments:
        (frame,) = row.frames
        assert frame.digest == digest_of(body[frame.offset : frame.offset + frame.length])
    assert head.segments[-1].frames[0].offset + head.segments[-1].frames[0].length == len(body)


def test_an_empty_delta_is_a_head() -> None:
    body, length = pack_shard(DELTA, 4, 3, LAYOUT, [])
    assert (len(body), length) == (64, 64)
    assert unpack_head(body, LAYOUT).segments == ()


def test_the_preamble_is_as_documented() -> None:
    body, _ = pack_shard(DELTA, 4, 3, LAYOUT, [])
    assert body == bytes.fromhex(
        "48525753 0100 0100 00000000 01000000 00000000 00000000"
        f"0400000000000000 0300000000000000 {LAYOUT.digest} 4000000000000000"
    )


def test_every_flipped_bit_and_every_cut_of_a_head_is_refused_or_changes_its_digest() -> None:
    body, length = full_shard()
    whole = digest_of(body[:length])
    for bit in range(length * 8):
        data = bytearray(body)
        data[bit // 8] ^= 1 << bit % 8
        assert digest_of(bytes(data[:length])) != whole
        try:
            head = unpack_head(bytes(data), LAYOUT)
        except DeltaCorrupt:
            continue
        for row in head.segments:
            for frame in row.frames:
                assert frame.start + frame.count <= LAYOUT.segments[row.index].count
    for cut in range(length):
        with pytest.raises(DeltaCorrupt):
            unpack_head(body[:cut], LAYOUT)


def test_objects_that_do_not_fit_the_layout_are_refused() -> None:
    data = np.zeros(96, np.uint16)
    whole = frames_of(0, data)
    cases = [
        (FULL, [SegmentFrames(0, b"\0" * 16, ())]),
        (FULL, [SegmentFrames(0, b"\0" * 16, (Frame(0, 40, b"x"),))]),
        (DELTA, [SegmentFrames(0, b"\0" * 16, (Frame(0, 40, b"x"), Frame(39, 5, b"y")))]),
        (DELTA, [SegmentFrames(0, b"\0" * 16, (Frame(90, 7, b"x"),))]),
        (DELTA, [SegmentFrames(0, b"\0" * 16, (Frame(0, 0, b"x"),))]),
        (DELTA, [SegmentFrames(7, b"\0" * 16, (Frame(0, 1, b"x"),))]),
        (DELTA, [whole, whole]),
        (9, [whole]),
    ]
    for kind, rows in cases:
        with pytest.raises(DeltaCorrupt):
            unpack_head(pack_shard(kind, 1, 0, LAYOUT, rows)[0], LAYOUT)
    other = Layout.of({"w": np.zeros(201, np.uint16)}, {"w": "bfloat16"})
    with pytest.raises(DeltaCorrupt, match="layout"):
        unpack_head(full_shard()[0], other)
    with pytest.raises(DeltaCorrupt, match="rank 2 of 2"):
        unpack_head(pack_shard(DELTA, 1, 0, LAYOUT, [], rank=2, ranks=2)[0], LAYOUT)


def test_two_ranks_make_one_version() -> None:
    rows = [frames_of(s.index, np.full(s.count, 7, np.uint16)) for s in LAYOUT.segments]
    heads = [unpack_head(pack_shard(DELTA, 1, 0, LAYOUT, rows[r::2], r, 2)[0], LAYOUT) for r in range(2)]
    assert [[row.index for row in head.segments] for head in heads] == [[0, 2], [1]]
    assert {head.ranks for head in heads} == {2}


def test_the_root_depends_on_every_segment_and_their_order() -> None:
    a, b = digest_of(b"a"), digest_of(b"b")
    assert len({root_of([a, b]), root_of([b, a]), root_of([a]), root_of([])}) == 4


def manifest() -> WeightManifest:
    ref = ShardRef(KEYS.shard("delta", 4, "0-ab", 0), 900, 64, "00" * 16)
    return WeightManifest(
        version=4, lineage=1, batch=3, parent=2, parent_sha256="ab" * 32, root_digest="01" * 16,
        layout_digest=LAYOUT.digest, newest_full=0, delta=(ref,), full=(), changed=(20,), elements=200,
        attempt="1-ab", published_ms=1_700_000_000_000,
    )  # fmt: skip


def test_a_manifest_comes_back_with_its_sha256() -> None:
    body, sha256 = manifest().to_bytes()
    assert WeightManifest.from_bytes(body) == (manifest(), sha256)
    assert json.loads(body)["sha256"] == sha256
    pretty = json.dumps(json.loads(body), indent=2).encode()
    assert WeightManifest.from_bytes(pretty)[1] == sha256
    assert replace(manifest(), batch=4).to_bytes()[1] != sha256


def test_a_committed_version_says_what_the_manifest_says() -> None:
    committed = manifest().committed(KEYS, "ff")
    assert (committed.version, committed.lineage, committed.batch, committed.parent) == (4, 1, 3, 2)
    assert committed.manifest_key == "runs/first/main/manifest/000000000004.json"
    assert (committed.kind, committed.size, committed.changed_share) == ("delta", 900, 0.1)


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_refused() -> None:
    body, sha256 = manifest().to_bytes()
    for bit in range(len(body) * 8):
        data = bytearray(body)
        data[bit // 8] ^= 1 << bit % 8
        try:
            found, seen = WeightManifest.from_bytes(bytes(data))
        except DeltaCorrupt:
            continue
        # Only what is no part of the body may differ: white space at the end.
        assert (found, seen) == (manifest(), sha256)
    for cut in range(len(body) - 1):
        with pytest.raises(DeltaCorrupt):
            WeightManifest.from_bytes(body[:cut])


@pytest.mark.parametrize(
    "change",
    [
        {"parent": 4},
        {"parent": -2},
        {"parent": -1, "parent_sha256": ""},
        {"parent_sha256": ""},
        {"newest_full": 5},
        {"newest_full": 4},
        {"delta": ()},
        {"version": 4.0},
        {"version": True},
        {"batch": "3"},
        {"changed": (-1,)},
        {"changed": (201,)},
        {"codec": "headrace-delta/2"},
        {"root_digest": "zz"},
        {"attempt": 5},
        {"delta": (ShardRef("../../etc/passwd\n", 900, 64, "00"),)},
        {"delta": (ShardRef("a", 63, 63, "00"),)},
        {"delta": (ShardRef("a", 100, 101, "00"),)},
    ],
)
def test_contradictions_are_refused_even_with_a_right_sha256(change: dict[str, object]) -> None:
    body, _ = replace(manifest(), **change).to_bytes()  # type: ignore[arg-type]
    with pytest.raises(DeltaCorrupt):
        WeightManifest.from_bytes(body)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"body":1,"sha256":2}', b"[" * 100_000])
def test_garbage_is_no_manifest(data: bytes) -> None:
    with pytest.raises(DeltaCorrupt):
        WeightManifest.from_bytes(data)


def test_keys_sort_like_versions_and_read_back() -> None:
    keys = [KEYS.manifest(version) for version in (0, 9, 10, 99, 123456)]
    assert keys == sorted(keys)
    assert [KEYS.version_of(key) for key in keys] == [0, 9, 10, 99, 123456]
    for other in ("runs/first/main/manifest/1.json", KEYS.latest, KEYS.manifest(3) + ".tmp", "x" + KEYS.manifest(3)):
        assert KEYS.version_of(other) is None


def test_applied_frames_give_the_digest_of_the_whole_segment() -> None:
    """Also of what lies before, between and after the frames, whatever their mode is."""
    rng = np.random.default_rng(1)
    old = rng.integers(0x3F00, 0x3FFF, 5000, np.uint16)
    new = old.copy()
    new[[10, 900, 2000, 2001, 4990]] += np.uint16(3)
    new[1000:1500] = rng.integers(0, 0xFFFF, 500, np.uint16)
    kernels = NumpyKernels()
    frames = [
        (8, 893, encode_absolute(old[8:901], new[8:901])),
        (1000, 500, encode_dense(new[1000:1500])),
        (1999, 3000, encode_steps(kernels.scan(old[1999:4999], new[1999:4999], np.array([0, 3000]))[0], 3000)),
    ]
    target = old.copy()
    assert apply_frames(frames, target, kernels) == digest_of(new)
    assert np.array_equal(target, new)
    assert apply_frames([], target, kernels) == digest_of(new)
