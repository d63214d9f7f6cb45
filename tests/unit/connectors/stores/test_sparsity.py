"""Shares of changed weights: by tensor, by role, and what keys of merged deltas mean."""

import numpy as np
import pytest

from headrace.connectors.stores.sparsity import changed_by_role, changed_by_tensor, role_of
from headrace.schemas.delta_layout import Layout
from headrace.schemas.delta_manifest import DeltaKeys, ShardRef, WeightManifest

NAMES = ("model.embed.weight", "model.layers.0.up.weight", "model.layers.1.up.weight", "model.layers.1.norm.weight")


def the_layout() -> Layout:
    arrays = {name: np.zeros((10, 10), np.uint16) for name in NAMES}
    return Layout.of(arrays, dict.fromkeys(NAMES, "bfloat16"))


def manifest(*changed: int) -> WeightManifest:
    ref = ShardRef("runs/a/b/delta/1/x/r0.bin", 100, 64, "ab" * 16)
    return WeightManifest(
        version=1, lineage=0, batch=1, parent=0, parent_sha256="0" * 64, root_digest="ab", layout_digest="cd",
        newest_full=0, delta=(ref,), full=(), changed=changed, elements=400, attempt="x", published_ms=1,
    )  # fmt: skip


def test_layers_are_taken_together() -> None:
    one = manifest(0, 10, 30, 1)
    assert changed_by_tensor(one, the_layout()) == dict(zip(NAMES, (0.0, 0.1, 0.3, 0.01), strict=True))
    assert changed_by_role(one, the_layout()) == {
        "model.embed.weight": 0.0,
        "model.layers.*.up.weight": 0.2,
        "model.layers.*.norm.weight": 0.01,
    }


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.11.mlp.experts.120.up.weight", "model.layers.*.mlp.experts.*.up.weight"),
        ("h.0.w1", "h.*.w1"),
        ("w", "w"),
    ],
)
def test_numbers_between_dots_are_left_out(name: str, role: str) -> None:
    assert role_of(name) == role


def test_a_manifest_of_other_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        changed_by_role(manifest(1, 2), the_layout())


def test_keys_of_merged_deltas_are_read_back() -> None:
    keys = DeltaKeys("first", "main")
    key = keys.merged(16, 0)
    assert key == "runs/first/main/merged/000000000016-000000000000.json"
    assert keys.merge_of(key) == (16, 0)
    assert keys.merged(7, 3) < keys.merged(8, 0) < keys.merged(8, 4) < keys.merged_shard(9, 1, "a", 0, 0)


@pytest.mark.parametrize(
    "tail", ["16-0.json", "000000000016.json", "000000000016-000000000000/x/r0-0.bin", "a-b.json", ""]
)
def test_other_keys_are_none(tail: str) -> None:
    keys = DeltaKeys("first", "main")
    assert keys.merge_of(keys.merges + tail) is None
    assert keys.merge_of("runs/other/main/merged/000000000016-000000000000.json") is None


def test_parts_of_a_rank_have_keys_of_their_own() -> None:
    keys = DeltaKeys("first", "main")
    names = {keys.shard("full", 3, "0-a", rank, part) for rank in range(3) for part in range(3)}
    assert len(names) == 9
    assert keys.shard("full", 3, "0-a", 1) == "runs/first/main/full/3/0-a/r1.bin"
