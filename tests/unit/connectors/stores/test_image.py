"""Versions whose manifests name objects that are sound by themselves, and not what the version is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.stores.chain import Chain, Hop, MissingLink
from headrace.connectors.stores.image import apply_hop, load_image
from headrace.connectors.stores.local import LocalStore
from headrace.schemas.delta_codec import Frame, encode_dense
from headrace.schemas.delta_layout import DeltaCorrupt, Layout
from headrace.schemas.delta_manifest import ShardRef, WeightManifest
from headrace.schemas.delta_shard import FULL, SegmentFrames, digest_of, pack_shard, root_of
from headrace.trainers.step_to_delta import DeltaPublisher

WEIGHTS = {"w": np.arange(2048, dtype=np.uint16)}
LAYOUT = Layout.of(WEIGHTS, {"w": "bfloat16"}, segment_bytes=1024)


class Forged:
    """Three versions, a full with each, and manifests written over."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder)
        publisher = DeltaPublisher(self.store, "first", "main", LAYOUT, full_every=1)
        head = None
        for version in range(3):
            bits = WEIGHTS["w"] + np.uint16(0)
            bits[::100] += np.uint16(version)
            head = publisher.publish({"w": bits}, version=version, lineage=0, batch=version, parent=head)

    def manifest(self, version: int) -> WeightManifest:
        return WeightManifest.from_bytes(self.store.get(f"runs/first/main/manifest/{version:012d}.json"))[0]

    def write(self, manifest: WeightManifest) -> None:
        self.store.put(f"runs/first/main/manifest/{manifest.version:012d}.json", manifest.to_bytes()[0])

    def why_not(self) -> str:
        """Why version 2 cannot be built on version 1."""
        chain = Chain(self.store, "first", "main")
        with pytest.raises(MissingLink) as caught:
            load_image(chain, 2, load_image(chain, 1), without=["full of version 2"])
        return str(caught.value.__cause__)


def sized(ref: ShardRef, more: int) -> ShardRef:
    return replace(ref, nbytes=ref.nbytes + more)


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (lambda two, one: two.full, "is not the delta of version 2"),
        (lambda two, one: one.delta, "is not the delta of version 2"),
        (lambda two, one: one.full, "is not the delta of version 2"),
        (lambda two, one: tuple(sized(ref, 1) for ref in two.delta), "not the object that its manifest names"),
        (lambda two, one: tuple(sized(ref, -1) for ref in two.delta), "not the object that its manifest names"),
        (lambda two, one: two.delta * 2, "does not lead to its root digest"),
        (lambda two, one: tuple(replace(ref, digest="00" * 16) for ref in two.delta), "does not have digest 0000"),
        (lambda two, one: tuple(replace(ref, head=ref.head - 32) for ref in two.delta), "does not have digest"),
    ],
)
def test_objects_of_something_else_are_refused_by_name(
    tmp_path: Path, forge: Callable[[WeightManifest, WeightManifest], tuple[ShardRef, ...]], says: str
) -> None:
    forged = Forged(tmp_path)
    two, one = forged.manifest(2), forged.manifest(1)
    assert load_image(Chain(forged.store, "first", "main"), 2).root_digest == two.root_digest
    forged.write(replace(two, delta=forge(two, one)))
    assert says in forged.why_not()


@pytest.mark.parametrize("name", ["root_digest", "layout_digest"])
def test_a_version_that_says_another_root_or_layout_is_refused(tmp_path: Path, name: str) -> None:
    forged = Forged(tmp_path)
    other = Layout.of({"v": WEIGHTS["w"]}, {"v": "bfloat16"}, segment_bytes=1024)
    forged.store.put(f"runs/first/main/layout/{other.digest}", other.to_bytes())
    forged.write(replace(forged.manifest(2), **{name: other.digest}))
    assert ("root digest" if name == "root_digest" else f"expected {other.digest}") in forged.why_not()


@pytest.mark.parametrize("segment_bytes", [512, 2048, 4096])
def test_a_base_of_another_layout_is_built_on_by_nobody(tmp_path: Path, segment_bytes: int) -> None:
    """A version that names its parent rightly, and cuts or lays out its weights otherwise."""
    forged = Forged(tmp_path)
    layout = Layout.of({"v": WEIGHTS["w"]}, {"v": "bfloat16"}, segment_bytes=segment_bytes)
    other, head = DeltaPublisher(LocalStore(tmp_path / "other"), "first", "main", layout, full_every=1), None
    for version in range(3):
        head = other.publish({"v": WEIGHTS["w"] + np.uint16(version)}, version=version, lineage=0, batch=0, parent=head)
    for info in LocalStore(tmp_path / "other").list("runs/first/main/"):
        if "/manifest/" not in info.key:
            forged.store.put(info.key, LocalStore(tmp_path / "other").get(info.key))
    data = LocalStore(tmp_path / "other").get("runs/first/main/manifest/000000000002.json")
    chain = Chain(forged.store, "first", "main")
    forged.write(replace(WeightManifest.from_bytes(data)[0], parent_sha256=chain.link(1).sha256))
    assert "weights object has layout" in forged.why_not(), "by a full and the delta"
    with pytest.raises(DeltaCorrupt, match="has another layout than its base"):
        apply_hop(chain, Hop.delta(chain.link(2)), load_image(chain, 1))
    image = load_image(chain, 2, load_image(chain, 1))
    assert np.array_equal(image.layout.views(image.data)["v"], WEIGHTS["w"] + np.uint16(2))


def test_a_full_that_lacks_a_segment_is_none_even_under_a_root_that_fits(tmp_path: Path) -> None:
    """Else what happens to lie in memory would be served for it."""
    store = LocalStore(tmp_path)
    image = LAYOUT.image()
    LAYOUT.fill(image, WEIGHTS)
    rows = [
        SegmentFrames(segment.index, digest_of(bits), (Frame(0, segment.count, encode_dense(bits)),))
        for segment in LAYOUT.segments[:-1]
        for bits in [LAYOUT.elements(image, segment)]
    ]
    body, head = pack_shard(FULL, 0, -1, LAYOUT, rows)
    key = "runs/first/main/full/0/0-a/r0.bin"
    ref = ShardRef(key, len(body), head, digest_of(body[:head]).hex())
    manifest = WeightManifest(
        version=0, lineage=0, batch=0, parent=-1, parent_sha256="", root_digest=root_of(row.digest for row in rows),
        layout_digest=LAYOUT.digest, newest_full=0, delta=(), full=(ref,), changed=(2048,), elements=2048,
        attempt="0-a", published_ms=1,
    )  # fmt: skip
    store.put(key, body)
    store.put(f"runs/first/main/layout/{LAYOUT.digest}", LAYOUT.to_bytes())
    store.put("runs/first/main/manifest/000000000000.json", manifest.to_bytes()[0])
    with pytest.raises(MissingLink) as caught:
        load_image(Chain(store, "first", "main"), 0)
    assert "the full of version 0 does not lead to its root digest" in str(caught.value.__cause__)
