"""Several ranks publish one version: what readers get is the gathered model, bit for bit."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nursery import Nursery
from thread_ranks import on_ranks

from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.store import StoreUnavailable
from headrace.pipeline.delta_to_worker import WeightReader, verify_chain
from headrace.schemas.delta_layout import DeltaError, Layout
from headrace.schemas.delta_manifest import CommittedVersion
from headrace.trainers.backends.backend import TensorShard
from headrace.trainers.patience import patiently
from headrace.trainers.ranks import Ranks
from headrace.trainers.shard_exchange import plan_exchange
from headrace.trainers.sharded_publisher import ShardedPublisher
from headrace.trainers.step_to_delta import DeltaPublisher, VersionCommits
from headrace.trainers.version_share import VersionShare, share_of

SHAPES = {"embed": (50, 30), "norm": (30,), "up": (40, 33)}


def weights_of(version: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    out = {name: rng.integers(0, 1 << 16, shape, np.uint16) for name, shape in SHAPES.items()}
    for number in range(1, version + 1):
        for array in out.values():
            array[np.random.default_rng(number).random(array.shape) < 0.1] += 1
    return out


def the_layout(segment_bytes: int = 256) -> Layout:
    return Layout.of(weights_of(0), dict.fromkeys(SHAPES, "bfloat16"), segment_bytes=segment_bytes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
def test_shares_are_contiguous_and_cover_the_image(ranks: int) -> None:
    layout = the_layout()
    shares = [share_of(layout, rank, ranks) for rank in range(ranks)]
    assert [n for one in shares for n in one] == list(range(len(layout.segments)))
    sizes = [len(one) for one in shares]
    assert max(sizes) - min(sizes) <= 2


@pytest.mark.parametrize("ranks", [2, 5])
def test_simulated_ranks_upload_objects_of_their_own(tmp_path: Path, ranks: int) -> None:
    store, layout = LocalStore(tmp_path), the_layout()
    commits = VersionCommits(store, "first", "main", layout, 2)
    shares = [VersionShare(store, commits.chain.keys, layout, rank=r, ranks=ranks) for r in range(ranks)]
    head: CommittedVersion | None = None
    for version in range(5):
        image = layout.image()
        layout.fill(image, weights_of(version))
        for share in shares:
            share.room()[:] = image[share.span]
        draft = commits.draft(version, 0, head)
        with ThreadPoolExecutor(ranks) as pool:
            reports = list(pool.map(lambda share, draft=draft: share.upload(draft), shares))
        manifest = commits.manifest(draft, 0, version, reports[::-1])
        assert len(manifest.delta) == (ranks if version else 0)
        head = commits.commit(manifest)
        for share in shares:
            share.promote(head)
    reader = WeightReader(store, "first", "main")
    for version in (0, 1, 2, 3, 4, 1):
        reader.fetch(version)
        for name, array in reader.snapshot().weights.items():
            assert np.array_equal(array, weights_of(version)[name])
    assert not [one.problem for one in verify_chain(store, "first", "main") if one.problem]


def test_a_single_trainer_goes_on_from_what_ranks_published(tmp_path: Path) -> None:
    test_simulated_ranks_upload_objects_of_their_own(tmp_path, 3)
    publisher = DeltaPublisher(LocalStore(tmp_path), "first", "main", the_layout())
    head = publisher.head()
    assert head is not None
    publisher.publish(weights_of(5), version=5, lineage=0, batch=5, parent=head)
    reader = WeightReader(LocalStore(tmp_path), "first", "main")
    reader.fetch()
    assert np.array_equal(reader.snapshot().weights["up"], weights_of(5)["up"])


def test_one_rank_alone_publishes_as_the_single_trainer_does(tmp_path: Path) -> None:
    publisher = ShardedPublisher(LocalStore(tmp_path), "first", "main", the_layout(), Ranks())
    head = None
    for version in range(3):
        shards = {name: TensorShard(0, array.reshape(-1)) for name, array in weights_of(version).items()}
        head = publisher.publish(shards, version=version, lineage=0, batch=version, parent=head)
    assert publisher.baseline == head
    reader = WeightReader(LocalStore(tmp_path), "first", "main")
    reader.fetch()
    assert np.array_equal(reader.snapshot().weights["embed"], weights_of(2)["embed"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("parts", [[(0, 700), (701, 1500)], [(0, 800), (700, 1500)], [(0, 700), (700, 1499)], [(0, 0)]])
def test_weights_that_nobody_holds_or_two_hold_are_refused_on_every_rank(
    rank: int, parts: list[tuple[int, int]]
) -> None:
    sizes = {name: array.size for name, array in weights_of(0).items()}
    held = [{**{name: (0, size) for name, size in sizes.items()}, "embed": (0, 0)}, {}]
    for number, part in enumerate(parts):
        held[number] = {**held[number], "embed": part}
    with pytest.raises(DeltaError, match="of embed, which has 1500"):
        plan_exchange(the_layout(), held, Ranks(rank, 2))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_byte_goes_from_its_holder_to_its_owner_once(ranks: int) -> None:
    layout = the_layout()
    cuts = {name: [array.size * n // ranks for n in range(ranks + 1)] for name, array in weights_of(0).items()}
    held = [{name: (at[r], at[r + 1]) for name, at in cuts.items()} for r in range(ranks)]
    plans = [plan_exchange(layout, held, Ranks(rank, ranks)) for rank in range(ranks)]
    for target, plan in enumerate(plans):
        room, mine = np.zeros(layout.nbytes, np.uint8), share_of(layout, target, ranks)
        for source, runs in plan.incoming.items():
            assert list(runs) == list(plans[source].outgoing[target])
            for run in runs:
                room[run.begin : run.end] += 1
        inside = np.zeros(layout.nbytes, bool)
        for number in mine:
            inside[layout.segments[number].offset :][: layout.segments[number].nbytes] = True
        wanted = np.zeros(layout.nbytes, np.uint8)
        for tensor in layout.tensors:
            wanted[tensor.offset : tensor.offset + tensor.size * tensor.width] = 1
        assert np.array_equal(room, wanted * inside)


def test_shards_of_zero3_are_published_without_gathering(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "out").mkdir()
    nursery = Nursery(tmp_path)
    try:
        for rank in nursery.start_ranks(2, str(tmp_path / "store"), str(tmp_path / "out"), "4", program="shards"):
            assert rank.wait(240) == 0, rank.log()
    finally:
        nursery.close()
    store = LocalStore(tmp_path / "store")
    reader = WeightReader(store, "first", "main")
    for version in range(4):
        reader.fetch(version)
        gathered = np.load(tmp_path / "out" / f"{version}.npz")
        assert reader.snapshot().version.changed_share > 0
        for name, array in reader.snapshot().weights.items():
            assert array.tobytes() == gathered[name].tobytes(), (version, name)
    ranks = {key.rpartition("/")[2] for key in (info.key for info in store.list("runs/first/main/delta/3/"))}
    assert ranks == {"r0.bin", "r1.bin"}


class Away:
    """A store that cannot be read just once."""

    def __init__(self, store: LocalStore) -> None:
        self._store, self.away = store, False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get") and self.away:
            self.away = False
            raise StoreUnavailable("the store is away")
        return getattr(self._store, name)


def own_shards(layout: Layout, ranks: Ranks, version: int) -> dict[str, TensorShard]:
    """Of every tensor the elements that lie in this rank's own part of the image."""
    segments = [layout.segments[n] for n in share_of(layout, ranks.rank, ranks.size)]
    low, high = segments[0].offset, segments[-1].offset + segments[-1].nbytes
    shards = {}
    for tensor in layout.tensors:
        start, stop = (min(max(0, at - tensor.offset) // 2, tensor.size) for at in (low, high))
        shards[tensor.name] = TensorShard(start, weights_of(version)[tensor.name].reshape(-1)[start:stop])
    return shards


@pytest.mark.parametrize("unlucky", [0, 1, 2])
def test_a_rank_that_cannot_load_the_baseline_at_first_loads_it_with_the_others(tmp_path: Path, unlucky: int) -> None:
    layout = the_layout()

    def one(ranks: Ranks) -> CommittedVersion:
        store = Away(LocalStore(tmp_path))
        head: CommittedVersion | None = None
        for version in range(3):
            publisher = ShardedPublisher(store, "first", "main", layout, ranks)
            store.away = version > 0 and ranks.rank == unlucky
            shards = own_shards(layout, ranks, version)
            call = partial(publisher.publish, shards, version=version, lineage=0, batch=version, parent=head)
            head = patiently(call, StopSignal(), ranks)
            assert not store.away and publisher.baseline == head
        assert head is not None
        return head

    assert {head.version for head in on_ranks(3, one)} == {2}
    assert_readable(tmp_path, 3)


def test_weights_that_take_the_place_of_failed_ones_are_those_that_are_published(tmp_path: Path) -> None:
    layout, ranks = the_layout(), Ranks()
    publisher = ShardedPublisher(LocalStore(tmp_path), "first", "main", layout, ranks)
    commit, publisher.commits.commit = publisher.commits.commit, unavailable  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnavailable):
        publisher.publish(own_shards(layout, ranks, 5), version=0, lineage=0, batch=0, parent=None)
    publisher.commits.commit = commit  # type: ignore[method-assign]
    publisher.publish(own_shards(layout, ranks, 0), version=0, lineage=0, batch=0, parent=None)
    assert_readable(tmp_path, 1)


def unavailable(*_: object) -> CommittedVersion:
    raise StoreUnavailable("the store is away")


def assert_readable(folder: Path, versions: int) -> None:
    reader = WeightReader(LocalStore(folder), "first", "main")
    for version in range(versions):
        reader.fetch(version)
        for name, array in reader.snapshot().weights.items():
            assert np.array_equal(array, weights_of(version)[name])
