"""Merged deltas and pruning: fewer bytes for readers that lag, fewer objects in the store, and the same weights."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.stores.chain import Chain, MissingLink
from headrace.connectors.stores.local import LocalStore
from headrace.pipeline.delta_compact import Compactor
from headrace.pipeline.delta_prune import Pruned, prune
from headrace.pipeline.delta_to_worker import WeightReader, verify_chain
from headrace.schemas.delta_layout import DeltaCorrupt, Layout
from headrace.schemas.delta_manifest import ShardRef
from headrace.schemas.delta_merged import MergedDelta
from headrace.trainers.step_to_delta import DeltaPublisher, VersionTaken

SHAPE = (64, 48)


def weights_of(version: int) -> dict[str, np.ndarray]:
    bits = np.random.default_rng(1).integers(0, 1 << 15, SHAPE, np.uint16)
    for number in range(1, version + 1):
        bits[np.random.default_rng(number).random(SHAPE) < 0.02] += 1
    return {"w": bits}


class Place:
    def __init__(self, folder: Path, full_every: int = 20) -> None:
        self.store = LocalStore(folder)
        layout = Layout.of(weights_of(0), {"w": "bfloat16"}, segment_bytes=1024)
        self.publisher = DeltaPublisher(self.store, "first", "main", layout, full_every)
        self.head = None

    def advance(self, versions: int) -> None:
        for _ in range(versions):
            number = self.head.version + 1 if self.head else 0
            self.head = self.publisher.publish(
                weights_of(number), version=number, lineage=0, batch=number, parent=self.head
            )

    def reader(self) -> WeightReader:
        return WeightReader(self.store, "first", "main")

    def correct(self, reader: WeightReader) -> bool:
        return np.array_equal(reader.snapshot().weights["w"], weights_of(reader.version)["w"])

    def keys(self, folder: str) -> Sequence[str]:
        return [info.key for info in self.store.list(f"runs/first/main/{folder}/")]

    def compact(self) -> list[tuple[int, int]]:
        return Compactor(self.store, "first", "main").run()

    def prune(self, **kwargs: object) -> Pruned:
        return prune(self.store, "first", "main", **({"grace_seconds": 0, "orphan_seconds": 0} | kwargs))  # type: ignore[arg-type]


def test_merges_end_at_multiples_and_are_made_once(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.advance(18)
    assert place.compact() == [(0, 4), (4, 8), (8, 12), (12, 16), (0, 16)]
    assert place.compact() == []
    place.advance(4)
    assert place.compact() == [(16, 20)]


def test_a_reader_that_lags_takes_merged_deltas_and_fewer_bytes(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.advance(1)
    early, late = place.reader(), place.reader()
    early.fetch()
    late.fetch()
    place.advance(17)
    chained = early.fetch()
    assert chained.hops == 17
    place.compact()
    merged = late.fetch()
    assert (merged.version.version, merged.hops) == (17, 2)
    assert merged.bytes_read < 0.8 * chained.bytes_read
    assert place.correct(late)
    assert place.correct(early)


def test_a_damaged_merged_delta_is_passed_by(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.advance(1)
    reader, other = place.reader(), place.reader()
    reader.fetch()
    other.fetch()
    place.advance(8)
    place.compact()
    for key in place.keys("merged"):
        data = bytearray(place.store.get(key))
        data[len(data) // 2] ^= 4
        if key.endswith(".bin"):
            place.store.put(key, bytes(data))
    reader.fetch()
    assert reader.version == 8
    assert place.correct(reader)
    bad = [one for one in verify_chain(place.store, "first", "main") if one.problem]
    assert [one.version for one in bad] == [4, 8]
    assert "merged delta from version 0 to 4" in bad[0].problem
    for key in place.keys("merged"):
        place.store.put(key, b"junk")
    other.fetch()
    assert place.correct(other)


def test_merged_deltas_verify(tmp_path: Path) -> None:
    place = Place(tmp_path, full_every=8)
    place.advance(18)
    place.compact()
    checked = verify_chain(place.store, "first", "main")
    assert not [one.problem for one in checked if one.problem]
    assert checked[12].ways == ("delta", "merged")
    assert checked[16].ways[:2] == ("delta", "full")


def test_pruning_keeps_two_fulls_and_all_after_the_older(tmp_path: Path) -> None:
    place = Place(tmp_path, full_every=5)
    place.advance(18)
    place.compact()
    before = len(place.keys(""[:0] + "delta"))
    planned = place.prune(dry=True)
    assert len(place.keys("delta")) == before
    done = place.prune()
    assert (done.floor, done.versions, done.objects) == (10, tuple(range(10)), planned.objects)
    assert sorted({int(key.split("/")[4]) for key in place.keys("full")}) == [10, 15]
    assert sorted({int(key.split("/")[4]) for key in place.keys("delta")}) == list(range(11, 18))
    assert not [one.problem for one in verify_chain(place.store, "first", "main") if one.problem]
    reader = place.reader()
    for version in range(10, 18):
        reader.fetch(version)
        assert place.correct(reader)
    with pytest.raises(MissingLink):
        place.reader().fetch(9)
    assert place.prune().objects == 0


def test_single_versions_stay_with_what_rebuilds_them_until_nobody_names_them(tmp_path: Path) -> None:
    place = Place(tmp_path, full_every=5)
    place.advance(18)
    assert place.prune(single=[7, 16]).floor == 10
    assert sorted({int(key.split("/")[4]) for key in place.keys("full")}) == [5, 10, 15]
    assert sorted({int(key.split("/")[4]) for key in place.keys("delta")}) == [6, 7, *range(11, 18)]
    place.advance(10)
    assert place.prune(single=[7]).floor == 20, "also once they lie far below the floor"
    reader = place.reader()
    reader.fetch(7)
    assert place.correct(reader)
    with pytest.raises(MissingLink):
        place.reader().fetch(8)
    place.prune()
    with pytest.raises(MissingLink):
        place.reader().fetch(7)


def test_a_pruned_version_cannot_be_committed_again(tmp_path: Path) -> None:
    place = Place(tmp_path, full_every=3)
    place.advance(2)
    zombie = Place(tmp_path, full_every=3)
    zombie.head = zombie.publisher.head()
    zombie.publisher.load_baseline(1)
    place.advance(9)
    place.prune()
    with pytest.raises(VersionTaken):
        zombie.advance(1)


@pytest.mark.parametrize(
    ("needs", "floor"), [({"held": [7]}, 5), ({"checkpoints": [3]}, 0), ({"held": [1], "max_lag": 10}, 10)]
)
def test_readers_and_checkpoints_hold_what_leads_to_them(tmp_path: Path, needs: dict[str, object], floor: int) -> None:
    place = Place(tmp_path, full_every=5)
    place.advance(18)
    assert place.prune(**needs).floor == floor
    if floor < 10:
        reader = place.reader()
        reader.fetch(max(floor, 3))
        assert place.correct(reader)


def test_young_versions_are_kept(tmp_path: Path) -> None:
    place = Place(tmp_path, full_every=2)
    place.advance(9)
    assert place.prune(grace_seconds=60).objects == 0


def test_a_reader_below_the_floor_takes_a_full(tmp_path: Path) -> None:
    place = Place(tmp_path, full_every=4)
    place.advance(3)
    reader = place.reader()
    reader.fetch()
    place.advance(12)
    place.compact()
    place.prune()
    reader.fetch()
    assert reader.version == 14
    assert place.correct(reader)


def test_lost_attempts_and_unfinished_files_are_swept_when_old(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.advance(3)
    lost = "runs/first/main/delta/2/0-lost/r0.bin"
    place.store.put(lost, b"never committed")
    part = tmp_path / "runs/first/main/delta/2/.abc.part"
    part.write_bytes(b"half")
    assert place.prune(orphan_seconds=3600) == Pruned(0, (), 0, 0, 0, 0)
    for path in (tmp_path / lost, part):
        os.utime(path, (time.time() - 7200,) * 2)
    done = place.prune(orphan_seconds=3600)
    assert (done.objects, done.orphans, done.unfinished) == (1, 1, 1)
    assert not part.exists()
    assert not [one.problem for one in verify_chain(place.store, "first", "main") if one.problem]


def test_multipart_uploads_are_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.connectors.stores.s3 import S3Store

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        store = S3Store("bucket", "here", endpoint_url=f"http://{host}:{port}", region="us-east-1")
        store.create_bucket()
        for key in ("here/runs/a/x", "here/runs/b/x"):
            store._client.create_multipart_upload(Bucket="bucket", Key=key)
        assert store.sweep_unfinished("runs/a/", 0) == 0
        assert store.sweep_unfinished("runs/a/", time.time() + 1e6) == 1
        assert store.sweep_unfinished("", time.time() + 1e6) == 1
    finally:
        server.stop()


def test_a_plan_prefers_the_cheapest_mix(tmp_path: Path) -> None:
    place = Place(tmp_path, full_every=100)
    place.advance(1)
    reader = place.reader()
    reader.fetch()
    place.advance(22)
    place.compact()
    plan = Chain(place.store, "first", "main").plan(22, (0, reader.snapshot().version.manifest_sha256))
    assert [(hop.parent, hop.link.version) for hop in plan] == [(0, 16), (16, 20), (20, 21), (21, 22)]


def test_merged_manifests_are_checked() -> None:
    ref = ShardRef("runs/a/b/merged/x/r0-0.bin", 100, 64, "ab" * 16)
    one = MergedDelta(first=3, first_sha256="0" * 64, version=7, version_sha256="1" * 64, refs=(ref,), published_ms=5)
    data = one.to_bytes()
    assert MergedDelta.from_bytes(data) == one
    for at in range(0, len(data) - 1, 3):
        with pytest.raises(DeltaCorrupt):
            MergedDelta.from_bytes(data[:at] + bytes([data[at] ^ 2]) + data[at + 1 :])
    for wrong in ({"first": 7}, {"refs": ()}, {"first_sha256": ""}):
        body = {name: getattr(one, name) for name in one.__slots__} | wrong
        with pytest.raises(DeltaCorrupt):
            MergedDelta.from_bytes(MergedDelta(**body).to_bytes())


def test_adapters_travel_as_small_fulls(tmp_path: Path) -> None:
    """An adapter (LoRA) is a policy with a layout of its own whose versions are fulls: a reader needs one object."""
    store = LocalStore(tmp_path)
    rng = np.random.default_rng(2)
    names = [f"layers.{n}.q_proj.{side}" for n in range(2) for side in ("lora_A", "lora_B")]

    def adapter(version: int) -> dict[str, np.ndarray]:
        bits = np.random.default_rng(version).integers(0, 1 << 16, (4, 8, 64), np.uint16)
        return dict(zip(names, bits, strict=True))

    layout = Layout.of(adapter(0), dict.fromkeys(names, "bfloat16"))
    publisher = DeltaPublisher(store, "first", "main-adapter", layout)
    head = None
    for version in range(5):
        head = publisher.publish(adapter(version), version=version, lineage=0, batch=version, parent=head, kind="full")
    assert head is not None
    assert head.kind == "full"
    for version in rng.permutation(5):
        reader = WeightReader(store, "first", "main-adapter")
        loaded = reader.fetch(int(version))
        assert loaded.hops == 1
        assert all(np.array_equal(array, adapter(int(version))[n]) for n, array in reader.snapshot().weights.items())
    done = prune(store, "first", "main-adapter", grace_seconds=0, orphan_seconds=0)
    assert (done.floor, done.versions) == (3, (0, 1, 2))
    assert not [one.problem for one in verify_chain(store, "first", "main-adapter") if one.problem]
