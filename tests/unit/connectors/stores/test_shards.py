"""Objects of a version: cut at about 64 MB, each readable alone, complete together."""

from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.stores import shards as module
from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.shards import ShardWriter
from headrace.schemas.delta_layout import Layout
from headrace.schemas.delta_shard import digest_of, unpack_head


@pytest.fixture
def layout() -> Layout:
    return Layout.of({"w": np.zeros((64, 64), np.uint16)}, {"w": "bfloat16"}, segment_bytes=1024)


def image(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, 8192, np.uint8)


def test_a_full_is_cut_into_parts(tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PART", 3000)
    store, new = LocalStore(tmp_path), image(1)
    writer = ShardWriter(store, layout)
    rows = [one.row for one in writer.code(range(8), new, None, ())]
    refs = writer.upload_full(5, rows, new, lambda part: f"full/r0-{part}.bin")
    assert [ref.key for ref in refs] == [f"full/r0-{part}.bin" for part in range(4)]
    found = [segment.index for ref in refs for segment in unpack_head(store.get(ref.key), layout).segments]
    assert found == list(range(8))
    for ref in refs:
        data = store.get(ref.key)
        assert (len(data), digest_of(data[: ref.head]).hex()) == (ref.nbytes, ref.digest)


def test_a_share_in_the_middle_is_coded_from_its_own_bytes(layout: Layout, tmp_path: Path) -> None:
    old, new = image(1), image(1)
    new[3000] ^= 1
    writer = ShardWriter(LocalStore(tmp_path), layout, rank=1, ranks=3)
    digests = [digest_of(old[at : at + 1024]) for at in range(0, 8192, 1024)]
    coded = writer.code(range(2, 5), new[2048:5120], old[2048:5120], digests[2:5])
    assert [bool(one.row.frames) for one in coded] == [True, False, False]
    assert [one.row.index for one in coded] == [2, 3, 4]
    assert coded[0].row.digest == digest_of(new[2048:3072])
    assert [one.row.digest for one in coded[1:]] == digests[3:5]
    assert [sum(one.counts) for one in coded] == [1, 0, 0]


def test_an_unchanged_share_still_has_an_object(layout: Layout, tmp_path: Path) -> None:
    store, same = LocalStore(tmp_path), image(1)
    writer = ShardWriter(store, layout, rank=2, ranks=4)
    digests = [digest_of(same[at : at + 1024]) for at in range(0, 8192, 1024)]
    rows = [one.row for one in writer.code(range(8), same, same, digests)]
    (ref,) = writer.upload_delta(2, 1, rows, lambda part: f"r2-{part}.bin")
    head = unpack_head(store.get(ref.key), layout)
    assert (head.segments, head.rank, head.ranks, head.version, head.parent) == ((), 2, 4, 2, 1)
    assert ref.nbytes == ref.head == 64


def test_the_context_mode_makes_other_bytes_for_the_same_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    floats = (rng.standard_normal(1 << 18).astype(np.float32) * np.float32(0.02)).view(np.uint32)
    old = (floats >> 16).astype(np.uint16)
    new = old.copy()
    small = (old & 0x7FFF) < np.quantile(old & 0x7FFF, 0.3)
    new[small & (rng.random(old.size) < 0.2)] ^= 1
    table = Layout.of({"w": old}, {"w": "bfloat16"})
    sizes = []
    for context in (False, True):
        writer = ShardWriter(LocalStore(tmp_path / str(context)), table, context=context)
        (one,) = writer.code(range(1), new.view(np.uint8), old.view(np.uint8), [b""])
        sizes.append(sum(len(frame.payload) for frame in one.row.frames))
    assert sizes[1] < 0.85 * sizes[0]
