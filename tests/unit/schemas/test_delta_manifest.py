"""Manifests and merged deltas: sealed files, the rows of objects, keys that nothing else is taken for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.delta_codec import CODEC
from headrace.schemas.delta_layout import DeltaCorrupt
from headrace.schemas.delta_manifest import (
    DeltaKeys,
    ShardRef,
    WeightManifest,
    check_refs,
    read_refs,
    seal,
    unseal,
)
from headrace.schemas.delta_merged import MergedDelta

KEYS = DeltaKeys("first", "main")
REF = ShardRef("runs/first/main/full/0/a/r0.bin", 900, 64, "0f" * 16)
FULL = WeightManifest(
    version=0, lineage=0, batch=0, parent=-1, parent_sha256="", root_digest="01" * 16, layout_digest="02" * 16,
    newest_full=0, delta=(), full=(REF, replace(REF, key="runs/first/main/full/0/a/r1.bin")), changed=(3, 4),
    elements=7, attempt="a", published_ms=1,
)  # fmt: skip
MERGED = MergedDelta(
    first=3, first_sha256="ab" * 32, version=9, version_sha256="cd" * 32, refs=(REF,), published_ms=5
)  # fmt: skip
VERSIONS = st.integers(0, 10**12 - 1)


def test_a_sealed_file_holds_the_sha256_of_its_canonical_body() -> None:
    data, sha256 = seal({"format": "f", "codec": CODEC, "b": [1, {"y": 2, "x": 1}]})
    canonical = b'{"b":[1,{"x":1,"y":2}],"codec":"' + CODEC.encode() + b'","format":"f"}'
    assert sha256 == hashlib.sha256(canonical).hexdigest()
    assert json.loads(data) == {"body": json.loads(canonical), "sha256": sha256}
    assert unseal(data, "f") == ({"b": [1, {"y": 2, "x": 1}], "codec": CODEC}, sha256)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (seal({"format": "g", "codec": CODEC})[0], "not of f"),
        (seal({"format": "f", "codec": "other/1"})[0], "not of f"),
        (seal({"format": "f"})[0], "cannot be read"),
        (seal({"codec": CODEC})[0], "cannot be read"),
        (seal([1])[0], "cannot be read"),  # type: ignore[arg-type]
        (seal({"format": "f", "codec": CODEC})[0].replace(b"sha256", b"sha512"), "cannot be read"),
        (b'{"body":{"x":NaN},"sha256":"00"}', "cannot be read"),
        (b'{"body":{"format":"f"},"sha256":"' + b"0" * 64 + b'"}', "does not have the sha256"),
        (b"\xff{}", "cannot be read"),
    ],
)
def test_a_file_of_another_kind_or_without_its_seal_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(DeltaCorrupt, match=says):
        unseal(data, "f")


def test_a_manifest_of_absurd_size_is_refused_unread() -> None:
    with pytest.raises(DeltaCorrupt, match="the limit is"):
        unseal(b" " * ((64 << 20) + 1), "f")


def test_a_full_version_is_said_to_be_one() -> None:
    data, sha256 = FULL.to_bytes()
    assert WeightManifest.from_bytes(data) == (FULL, sha256)
    committed = FULL.committed(KEYS, sha256)
    assert (committed.kind, committed.size, committed.changed_share) == ("full", 1800, 1.0)
    assert replace(FULL, elements=0, changed=()).committed(KEYS, sha256).changed_share == 0.0


@pytest.mark.parametrize(
    "ref",
    [
        replace(REF, nbytes=63, head=63),
        replace(REF, head=63),
        replace(REF, head=901),
        replace(REF, nbytes=900.0),  # type: ignore[arg-type]
        replace(REF, head=True),
        replace(REF, key=""),
        replace(REF, key="a b"),
        replace(REF, key="x" * 901),
        replace(REF, nbytes=1 << 60),
        replace(REF, nbytes=1 << 40, head=1 << 40),
        replace(REF, nbytes=10**400, head=10**399),
        replace(REF, key="runs/../../etc/passwd"),
        replace(REF, key="/runs/a"),
        replace(REF, key="runs//a"),
        replace(REF, key="runs/a/"),
        replace(REF, key="runs/.a"),
        replace(REF, key="runs/é"),
        replace(REF, key="x" * 201),
        replace(REF, digest="0f"),
        replace(REF, digest=""),
        replace(REF, digest="0F"),
        replace(REF, digest="0f\n"),
    ],
)
def test_a_row_that_cannot_be_true_is_refused(ref: ShardRef) -> None:
    check_refs((REF,))
    with pytest.raises(ValueError, match="not sound"):
        check_refs((REF, ref))
    with pytest.raises(DeltaCorrupt, match="not sound"):
        WeightManifest.from_bytes(replace(FULL, full=(ref,)).to_bytes()[0])
    with pytest.raises(DeltaCorrupt, match="not sound"):
        MergedDelta.from_bytes(replace(MERGED, refs=(ref,)).to_bytes())


@pytest.mark.parametrize("rows", [5, [5], [["k", 1, 2]], [["k", 1, 2, "d", 5]], [{"key": "k"}]])
def test_rows_that_are_no_rows_are_refused(rows: Any) -> None:
    with pytest.raises(TypeError):
        read_refs(rows)
    body = json.loads(MERGED.to_bytes())["body"] | {"refs": rows}
    with pytest.raises(DeltaCorrupt, match="cannot be read"):
        MergedDelta.from_bytes(seal(body)[0])


@pytest.mark.parametrize(
    ("parent", "sha256"),
    [(-1, "ab" * 32), (0, ""), (0, "ab" * 31), (0, "AB" * 32), (0, "ab" * 32 + "\n"), (0, ["a"] * 64)],
)
def test_a_parent_is_named_by_a_whole_sha256_and_no_parent_by_none(parent: int, sha256: Any) -> None:
    sound = replace(FULL, version=3, newest_full=3, parent=0, parent_sha256="ab" * 32)
    assert WeightManifest.from_bytes(sound.to_bytes()[0])[0] == sound
    with pytest.raises(DeltaCorrupt, match="cannot be read"):
        WeightManifest.from_bytes(replace(sound, parent=parent, parent_sha256=sha256).to_bytes()[0])


@pytest.mark.parametrize("number", [1 << 63, 10**400, -(1 << 63)])
@pytest.mark.parametrize("name", ["version", "lineage", "batch", "parent", "newest_full", "elements", "published_ms"])
def test_numbers_that_nothing_can_count_are_refused(name: str, number: int) -> None:
    with pytest.raises(DeltaCorrupt, match=r"beyond what can be|contradict"):
        WeightManifest.from_bytes(replace(FULL, **{name: number}).to_bytes()[0])


@pytest.mark.parametrize("published_ms", [-1, 253_402_300_800_000])
def test_a_time_that_no_calendar_has_is_refused(published_ms: int) -> None:
    with pytest.raises(DeltaCorrupt, match="beyond what can be"):
        WeightManifest.from_bytes(replace(FULL, published_ms=published_ms).to_bytes()[0])


@pytest.mark.parametrize("name", ["root_digest", "layout_digest"])
@pytest.mark.parametrize("digest", ["ab", "", "0F" * 16, "ab" * 17, "ab" * 16 + "\n", 5, None])
def test_a_digest_is_32_hex_digits(name: str, digest: Any) -> None:
    with pytest.raises(DeltaCorrupt, match="cannot be read"):
        WeightManifest.from_bytes(replace(FULL, **{name: digest}).to_bytes()[0])


@pytest.mark.parametrize("name", [name for name in FULL.__slots__ if name != "codec"])
def test_a_manifest_without_one_of_its_fields_or_with_another_is_refused(name: str) -> None:
    body = json.loads(FULL.to_bytes()[0])["body"]
    less = {key: value for key, value in body.items() if key != name}
    for changed in (less, body | {"added": 1}, body | {name: None}, body | {name: {"a": 1}}):
        with pytest.raises(DeltaCorrupt):
            WeightManifest.from_bytes(seal(changed)[0])


def test_a_merged_delta_comes_back_and_is_no_manifest() -> None:
    assert MergedDelta.from_bytes(MERGED.to_bytes()) == MERGED
    with pytest.raises(DeltaCorrupt, match="not of headrace-manifest/1"):
        WeightManifest.from_bytes(MERGED.to_bytes())
    with pytest.raises(DeltaCorrupt, match="not of headrace-merged/1"):
        MergedDelta.from_bytes(FULL.to_bytes()[0])


@pytest.mark.parametrize(
    "over",
    [
        {"first": 9},
        {"first": 10},
        {"first": -1},
        {"first": 3.0},
        {"version": True},
        {"published_ms": "5"},
        {"published_ms": -1},
        {"published_ms": 10**400},
        {"version": 10**12},
        {"first_sha256": "ab"},
        {"version_sha256": ""},
        {"version_sha256": 5},
        {"refs": ()},
    ],
)
def test_a_merged_delta_that_contradicts_itself_is_refused(over: dict[str, Any]) -> None:
    with pytest.raises(DeltaCorrupt, match="cannot be read"):
        MergedDelta.from_bytes(replace(MERGED, **over).to_bytes())


def test_every_flipped_bit_of_a_merged_delta_is_refused_or_white_space() -> None:
    data = MERGED.to_bytes()
    for bit in range(len(data) * 8):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        try:
            assert MergedDelta.from_bytes(bytes(broken)) == MERGED
        except DeltaCorrupt:
            continue


@given(VERSIONS, VERSIONS)
def test_keys_of_versions_and_merges_read_back_and_sort_like_numbers(one: int, two: int) -> None:
    assert KEYS.version_of(KEYS.manifest(one)) == one
    assert (KEYS.manifest(one) < KEYS.manifest(two)) == (one < two)
    assert KEYS.merge_of(KEYS.merged(one, two)) == (one, two)
    assert KEYS.version_of(KEYS.merged(one, two)) is None
    assert KEYS.merge_of(KEYS.manifest(one)) is None


@pytest.mark.parametrize(
    "key",
    [
        "runs/first/main/merged/3-1.json",
        "runs/first/main/merged/000000000003-000000000001.json.tmp",
        "runs/first/main/merged/000000000003-000000000001/a/r0-0.bin",
        "runs/first/main/merged/000000000003.json",
        "runs/first/main/manifest/000000000003-000000000001.json",
        "runs/first/main/merged/-000000000001.json",
        "runs/first/main/merged/٠٠٠٠٠٠٠٠٠٠٠٣-000000000001.json",
        "runs/first/other/merged/000000000003-000000000001.json",
        "",
    ],
)
def test_other_keys_are_no_merges(key: str) -> None:
    assert KEYS.merge_of(key) is None


def test_every_object_of_a_policy_has_a_key_of_its_own_below_the_policys_root() -> None:
    keys = [
        KEYS.latest, KEYS.pruned, KEYS.layout("ab"), KEYS.manifest(1), KEYS.merged(1, 0),
        *(KEYS.shard(kind, v, "a", rank, part) for kind in ("full", "delta") for v in (1, 11) for rank in (0, 1)
          for part in (0, 1)),
        *(KEYS.merged_shard(2, 1, "a", rank, part) for rank in (0, 1) for part in (0, 1)),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert all(key.startswith("runs/first/main/") for key in keys)
    assert not any(key.startswith(KEYS.manifests) for key in keys if key != KEYS.manifest(1))
