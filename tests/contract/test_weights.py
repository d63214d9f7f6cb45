"""Publisher and reader against each other: what is served is what was published, bit for bit, whatever breaks."""

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.connectors.stores import image as image_module
from headrace.connectors.stores.chain import Chain, MissingLink, NothingCommitted
from headrace.connectors.stores.image import load_image, load_share
from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.s3 import S3Store
from headrace.connectors.stores.store import NoSuchKey, ObjectInfo, ObjectStore, StoreUnavailable
from headrace.pipeline.delta_to_worker import WeightReader, verify_chain
from headrace.schemas.delta_layout import DeltaCorrupt, DeltaError, Layout
from headrace.schemas.delta_manifest import CommittedVersion
from headrace.schemas.delta_steps import NumpyKernels
from headrace.trainers.step_to_delta import DeltaPublisher, VersionTaken

Weights = dict[str, NDArray[Any]]
SPECIAL = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7FC1, 0x7F7F], np.uint16)


def first_weights(rng: np.random.Generator) -> Weights:
    shapes = {"embed": (64, 16), "q": (40, 33), "norm": (16,), "down": (50, 31)}
    weights: Weights = {
        name: (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for name, shape in shapes.items()
    }
    return weights | {"scale": rng.standard_normal(37).astype(np.float32), "count": np.array(3, np.int64)}


DTYPES = dict.fromkeys(("embed", "q", "norm", "down"), "bfloat16") | {"scale": "float32", "count": "int64"}


def stepped(weights: Weights, rng: np.random.Generator, share: float = 0.05) -> Weights:
    """Weights after a step: a share of the bits moved, some to NaN payloads, infinities, -0.0 and denormals."""
    new = {name: array.copy() for name, array in weights.items()}
    for array in new.values():
        if array.dtype == np.uint16:
            move = rng.random(array.shape) < share
            array[move] += rng.choice(np.array([1, 0xFFFF, 2, 700], np.uint16), int(move.sum()))
            wild = rng.random(array.shape) < 0.01
            array[wild] = rng.choice(SPECIAL, int(wild.sum()))
    new["scale"] += np.float32(share)
    new["count"] += 1
    return new


def same(left: Weights, right: Any) -> bool:
    return list(left) == sorted(right, key=list(left).index) and all(
        left[name].tobytes() == right[name].tobytes() and left[name].shape == right[name].shape for name in left
    )


@dataclass
class Run:
    """A policy with its store, a publisher, and the truth about every version."""

    store: ObjectStore
    layout: Layout
    rng: np.random.Generator
    full_every: int = 20
    truth: dict[int, Weights] = field(default_factory=dict)
    drafts: dict[int, Weights] = field(default_factory=dict)
    head: CommittedVersion | None = None

    def publisher(self, store: ObjectStore | None = None) -> DeltaPublisher:
        return DeltaPublisher(store or self.store, "first", "main", self.layout, self.full_every)

    def reader(self, store: ObjectStore | None = None) -> WeightReader:
        return WeightReader(store or self.store, "first", "main")

    def advance(self, publisher: DeltaPublisher, versions: int = 1, share: float = 0.05) -> CommittedVersion:
        for _ in range(versions):
            number = self.head.version + 1 if self.head else 0
            if number not in self.drafts:
                before = self.truth.get(number - 1)
                self.drafts[number] = stepped(before, self.rng, share) if before else first_weights(self.rng)
            new = self.drafts[number]
            self.head = publisher.publish(new, version=number, lineage=0, batch=number, parent=self.head)
            self.truth[number] = new
        assert self.head is not None
        return self.head

    def correct(self, reader: WeightReader) -> bool:
        snapshot = reader.snapshot()
        assert snapshot.version.version == reader.version
        return same(self.truth[reader.version], snapshot.weights)


def make_run(store: ObjectStore, full_every: int = 20, segment_bytes: int = 512) -> Run:
    layout = Layout.of(first_weights(np.random.default_rng(0)), DTYPES, segment_bytes=segment_bytes)
    return Run(store, layout, np.random.default_rng(42), full_every)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(LocalStore(tmp_path / "store"))


@pytest.fixture(params=["local", "s3"])
def either(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    if request.param == "local":
        yield make_run(LocalStore(tmp_path / "store"))
        return
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    store = S3Store(f"weights-{uuid.uuid4().hex[:8]}", "here", endpoint_url=f"http://{host}:{port}", region="us-east-1")
    store.create_bucket()
    yield make_run(store)
    server.stop()


class Meddling:
    """A store in front of another one: every call passes ``before`` (may raise), every get ``damage`` (may change)."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda verb, key: None
        self.after: Callable[[str, str], None] = lambda verb, key: None
        self.damage: Callable[[str, int, bytes], bytes] = lambda key, start, data: data

    @property
    def url(self) -> str:
        return self.inner.url

    def _call(self, verb: str, key: str, call: Callable[[], Any]) -> Any:
        self.calls.append((verb, key))
        self.before(verb, key)
        answer = call()
        self.after(verb, key)
        return answer

    def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        self._call("put", key, lambda: self.inner.put(key, data, create_only=create_only))

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        data = self._call("get", key, lambda: self.inner.get(key, start, end))
        return self.damage(key, start or 0, data)

    def head(self, key: str) -> ObjectInfo:
        return self._call("head", key, lambda: self.inner.head(key))  # type: ignore[no-any-return]

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return iter(self._call("list", prefix, lambda: list(self.inner.list(prefix, start_after))))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self.inner.delete(key))

    def shards_read(self) -> Sequence[str]:
        return [key for verb, key in self.calls if verb == "get" and key.endswith(".bin")]


def shards(store: ObjectStore, kind: str, version: int) -> list[str]:
    return [info.key for info in store.list(f"runs/first/main/{kind}/{version}/")]


# ---- what is served is what was published ------------------------------------------------------------------------


def test_every_version_is_served_bit_for_bit(either: Run) -> None:
    publisher, reader = either.publisher(), either.reader()
    assert publisher.head() is None
    assert reader.head_version() == -1
    with pytest.raises(NothingCommitted, match="version 0"):
        reader.fetch()
    for share in (0.0, 0.01, 0.5, 1.0, 0.0, 0.05):
        head = either.advance(publisher, share=share)
        loaded = reader.fetch()
        assert loaded.version == head
        assert loaded.advanced
        assert reader.version == head.version
        assert either.correct(reader)
    assert not reader.fetch().advanced
    assert publisher.head() == head
    assert publisher.baseline == head
    for version in (0, 3, 5, 1):
        assert reader.fetch(version).version.version == version
        assert either.correct(reader)


def test_an_unchanged_version_costs_a_head_and_a_manifest(run: Run) -> None:
    publisher, reader = run.publisher(), run.reader()
    first = run.advance(publisher)
    second = publisher.publish(run.truth[0], version=1, lineage=0, batch=1, parent=first)
    run.truth[1] = run.truth[0]
    assert (second.size, second.changed_share, second.root_digest) == (64, 0.0, first.root_digest)
    reader.fetch(0)
    assert reader.fetch().version == second
    assert run.correct(reader)


def test_changed_elements_are_counted(run: Run) -> None:
    publisher = run.publisher()
    first = run.advance(publisher)
    new = {name: array.copy() for name, array in run.truth[0].items()}
    new["q"].reshape(-1)[:7] ^= 1
    new["scale"][3] = 9
    second = publisher.publish(new, version=1, lineage=0, batch=1, parent=first)
    manifest = Chain(run.store, "first", "main").link(1).manifest
    by_name = dict(zip((t.name for t in run.layout.tensors), manifest.changed, strict=True))
    assert by_name == {"embed": 0, "q": 7, "norm": 0, "down": 0, "scale": 1, "count": 0}
    assert second.changed_share == pytest.approx(8 / sum(a.size for a in new.values()))


def test_a_late_reader_takes_the_newest_full_and_the_deltas_after_it(tmp_path: Path) -> None:
    run = make_run(LocalStore(tmp_path), full_every=4)
    run.advance(run.publisher(), 11, share=0.005)
    store = Meddling(run.store)
    reader = run.reader(store)
    loaded = reader.fetch()
    assert run.correct(reader)
    assert loaded.hops == 3
    assert [key.split("/")[3:5] for key in store.shards_read()] == [["full", "8"], ["delta", "9"], ["delta", "10"]]


def test_a_reader_one_behind_takes_the_delta_even_where_a_full_lies_beside_it(tmp_path: Path) -> None:
    run = make_run(LocalStore(tmp_path), full_every=3)
    publisher = run.publisher()
    run.advance(publisher, 3)
    store = Meddling(run.store)
    reader = run.reader(store)
    reader.fetch()
    run.advance(publisher)
    assert shards(run.store, "full", 3)
    store.calls.clear()
    reader.fetch()
    assert [key.split("/")[3] for key in store.shards_read()] == ["delta"]
    assert run.correct(reader)


def test_a_reader_that_missed_many_versions_converges_by_the_cheapest_way(tmp_path: Path) -> None:
    run = make_run(LocalStore(tmp_path), full_every=10)
    publisher, reader = run.publisher(), run.reader()
    run.advance(publisher)
    reader.fetch()
    run.advance(publisher, 25, share=0.9)
    loaded = reader.fetch()
    assert loaded.hops < 10
    assert run.correct(reader)


def test_large_objects_are_read_in_ranges(either: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_module, "_WHOLE", 0)
    monkeypatch.setattr(image_module, "_WINDOW", 700)
    monkeypatch.setattr(image_module, "_PARALLEL_ABOVE", 0)
    either.advance(either.publisher(), 3, share=0.2)
    reader = either.reader()
    loaded = reader.fetch()
    assert either.correct(reader)
    assert loaded.bytes_read == sum(either.store.head(k).size for v in range(3) for k in (
        shards(either.store, "full", v) or shards(either.store, "delta", v)
    ))  # fmt: skip


def test_an_announced_update_is_one_request(run: Run) -> None:
    publisher, store = run.publisher(), Meddling(run.store)
    run.advance(publisher)
    reader = run.reader(store)
    reader.fetch()
    for _ in range(3):
        head = run.advance(publisher)
        store.calls.clear()
        reader.fetch(head.version, head.manifest_sha256, publisher.commits.announced(head))
        assert [verb for verb, _ in store.calls] == ["get"]
        assert run.correct(reader)


@pytest.mark.parametrize("wrong", [b"", b"junk", b'{"body":{},"sha256":""}'])
def test_an_announcement_with_a_wrong_manifest_misleads_nobody(run: Run, wrong: bytes) -> None:
    publisher, reader = run.publisher(), run.reader()
    first = run.advance(publisher)
    reader.fetch()
    head = run.advance(publisher)
    for manifest in (wrong, publisher.commits.announced(first)):
        reader.fetch(head.version, head.manifest_sha256, manifest)
        assert reader.version == 1
        assert run.correct(reader)
    with pytest.raises(DeltaCorrupt):
        reader.fetch(head.version, first.manifest_sha256, publisher.commits.announced(head))


def test_parts_of_an_object_are_fetched_side_by_side_and_repaired(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_module, "_CHUNK", 300)
    monkeypatch.setattr(image_module, "_PARALLEL_ABOVE", 0)
    run.advance(run.publisher(), 2, share=0.3)
    (key,) = shards(run.store, "delta", 1)
    size = run.store.head(key).size
    for at, cut in [(None, 0), (10, 0), (size - 5, 0), (size // 2, 0), (None, 250), (None, 299)]:
        store = Meddling(run.store)
        reader = run.reader(store)
        reader.fetch(0)
        store.calls.clear()
        damaged: list[int] = []

        def damage(
            name: str, start: int, data: bytes, at: int | None = at, cut: int = cut, damaged: list[int] = damaged
        ) -> bytes:
            if name != key or damaged or not (cut or (at is not None and start <= at < start + len(data))):
                return data
            damaged.append(start)
            return data[:cut] if cut else data[: at - start] + b"?!" + data[at - start + 2 :]  # type: ignore[operator]

        store.damage = damage
        loaded = reader.fetch()
        assert run.correct(reader), (at, cut)
        assert len(store.shards_read()) >= -(-size // 300)
        assert loaded.bytes_read <= size or at is not None


def test_a_snapshot_never_changes(run: Run) -> None:
    publisher, reader = run.publisher(), run.reader()
    run.advance(publisher)
    reader.fetch()
    held = reader.snapshot()
    with pytest.raises(ValueError, match="read-only"):
        held.weights["q"][0] = 0
    run.advance(publisher, 3)
    reader.fetch()
    assert held.version.version == 0
    assert same(run.truth[0], held.weights)
    assert run.correct(reader)


def test_reading_races_publishing(run: Run) -> None:
    publisher = run.publisher()
    run.advance(publisher)
    reader = run.reader()
    done = threading.Event()

    def publish() -> None:
        run.advance(publisher, 60)
        done.set()

    seen: set[int] = set()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(publish)
        while not done.is_set() or reader.version < 60:
            reader.fetch()
            snapshot = reader.snapshot()
            number = snapshot.version.version
            seen.add(number)
            while number not in run.truth:
                done.wait(0.001)
            assert same(run.truth[number], snapshot.weights)
            if writing.done():
                writing.result()
        writing.result()
    assert reader.version == 60
    assert len(seen) > 2


# ---- resume, rollback, two writers -------------------------------------------------------------------------------


def test_a_resumed_trainer_goes_on_from_the_stores_head(run: Run) -> None:
    run.advance(run.publisher(), 4)
    resumed = run.publisher()
    head = resumed.head()
    assert head == run.head
    assert same(run.truth[3], resumed.load_baseline(head))
    run.advance(resumed, 2)
    reader = run.reader()
    reader.fetch()
    assert run.correct(reader)


def test_a_resumed_trainer_need_not_load_the_baseline_itself(run: Run) -> None:
    run.advance(run.publisher(), 2)
    run.advance(run.publisher())
    reader = run.reader()
    reader.fetch()
    assert run.correct(reader)


def test_another_architecture_under_the_same_policy_is_refused(run: Run) -> None:
    head = run.advance(run.publisher())
    other = Layout.of({"x": np.zeros(5, np.uint16)}, {"x": "bfloat16"})
    publisher = DeltaPublisher(run.store, "first", "main", other)
    with pytest.raises(DeltaError, match="another architecture"):
        publisher.load_baseline(head)


def test_a_rollback_publishes_an_old_version_as_a_new_one(run: Run) -> None:
    publisher, reader = run.publisher(), run.reader()
    head = run.advance(publisher, 6, share=0.3)
    reader.fetch()
    old = run.truth[2]
    back = publisher.publish(old, version=head.version + 1, lineage=1, batch=2, parent=head)
    run.truth[back.version] = old
    reader.fetch()
    assert (reader.version, reader.snapshot().version.lineage) == (6, 1)
    assert run.correct(reader)


def test_versions_may_have_gaps_but_never_go_back(run: Run) -> None:
    publisher, reader = run.publisher(), run.reader()
    head = run.advance(publisher, 2)
    run.truth[7] = stepped(run.truth[1], run.rng)
    with pytest.raises(ValueError, match="does not follow"):
        publisher.publish(run.truth[7], version=1, lineage=0, batch=2, parent=head)
    publisher.publish(run.truth[7], version=7, lineage=0, batch=2, parent=head)
    reader.fetch()
    assert reader.version == 7
    assert run.correct(reader)


@pytest.mark.parametrize("writers", [2, 6])
def test_of_two_writers_exactly_one_commits(either: Run, writers: int) -> None:
    head = either.advance(either.publisher())
    barrier = threading.Barrier(writers)
    drafts = [stepped(either.truth[0], np.random.default_rng(n)) for n in range(writers)]

    def write(number: int) -> CommittedVersion | VersionTaken:
        publisher = either.publisher()
        publisher.load_baseline(head)
        barrier.wait(timeout=60)
        try:
            return publisher.publish(drafts[number], version=1, lineage=number, batch=1, parent=head)
        except VersionTaken as taken:
            return taken

    with ThreadPoolExecutor(writers) as pool:
        outcomes = list(pool.map(write, range(writers)))
    winners = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, CommittedVersion)]
    assert len(winners) == 1
    reader = either.reader()
    reader.fetch(1)
    assert reader.snapshot().version.lineage == winners[0]
    assert same(drafts[winners[0]], reader.snapshot().weights)
    assert not [one.problem for one in verify_chain(either.store, "first", "main") if one.problem]


def test_the_loser_of_a_race_goes_on_after_the_winner(run: Run) -> None:
    head = run.advance(run.publisher())
    loser = run.publisher()
    loser.load_baseline(head)
    winner = run.advance(run.publisher())
    new = stepped(run.truth[0], run.rng)
    with pytest.raises(VersionTaken, match=r"version 1 .* was committed by attempt") as taken:
        loser.publish(new, version=1, lineage=0, batch=1, parent=head)
    assert taken.value.head == winner
    assert loser.baseline == head
    run.truth[2] = new
    assert loser.publish(new, version=2, lineage=0, batch=2, parent=taken.value.head).parent == 1
    reader = run.reader()
    reader.fetch()
    assert reader.version == 2
    assert run.correct(reader)


def test_a_commit_that_succeeded_unseen_is_found_by_the_retry(run: Run) -> None:
    store = Meddling(run.store)
    publisher = run.publisher(store)
    head = run.advance(publisher)

    def lose_the_answer(verb: str, key: str) -> None:
        if verb == "put" and "/manifest/" in key:
            store.after = lambda verb, key: None
            raise StoreUnavailable("the answer was lost")

    store.after = lose_the_answer
    new = stepped(run.truth[0], run.rng)
    with pytest.raises(StoreUnavailable):
        publisher.publish(new, version=1, lineage=0, batch=1, parent=head)
    assert publisher.baseline == head
    again = publisher.publish(new, version=1, lineage=0, batch=1, parent=head)
    assert again.version == 1
    assert publisher.head() == again
    assert len(shards(run.store, "delta", 1)) == 1


# ---- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["before-the-call", "after-the-call"])
def test_a_store_that_fails_at_every_step_of_a_publish_leaves_it_repeatable(tmp_path: Path, late: bool) -> None:
    for nth in range(40):
        run = make_run(LocalStore(tmp_path / f"{nth}"), full_every=2)
        store = Meddling(run.store)
        publisher = run.publisher(store)
        count = itertools.count()

        def fail(verb: str, key: str, count: Iterator[int] = count, nth: int = nth) -> None:
            if verb == "put" and next(count) == nth:
                raise StoreUnavailable("disk full")

        setattr(store, "after" if late else "before", fail)
        failed = 0
        while run.head is None or run.head.version < 5:
            before = publisher.baseline
            try:
                run.advance(publisher)
            except StoreUnavailable:
                failed += 1
                assert publisher.baseline == before
        reader = run.reader()
        for version in range(6):
            reader.fetch(version)
            assert run.correct(reader)
        if not failed and nth > next(count):
            break
    else:
        pytest.fail("the last failure was never past the end")


def test_a_version_without_manifest_is_invisible(run: Run) -> None:
    store = Meddling(run.store)
    publisher = run.publisher(store)
    head = run.advance(publisher)

    def dies(verb: str, key: str) -> None:
        if verb == "put" and "/manifest/" in key:
            raise KeyboardInterrupt

    store.before = dies
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(stepped(run.truth[0], run.rng), version=1, lineage=0, batch=1, parent=head)
    run.store.put("runs/first/main/delta/2/0-torn/r0.bin", b"half")
    assert shards(run.store, "delta", 1)
    reader = run.reader()
    assert reader.head_version() == 0
    reader.fetch()
    assert reader.version == 0
    run.advance(run.publisher(), 2)
    reader.fetch()
    assert reader.version == 2
    assert run.correct(reader)


def test_a_store_that_is_away_is_retriable_and_the_loaded_version_stays(run: Run) -> None:
    store = Meddling(run.store)
    publisher, reader = run.publisher(), run.reader(store)
    run.advance(publisher)
    reader.fetch()
    run.advance(publisher, 2)

    def away(verb: str, key: str) -> None:
        raise StoreUnavailable("connection refused")

    for nth in range(30):
        count = itertools.count()

        def away_later(verb: str, key: str, count: Iterator[int] = count, nth: int = nth) -> None:
            if next(count) >= nth:
                away(verb, key)

        store.before = away_later
        with suppress(StoreUnavailable):
            reader.fetch()
            assert reader.version == 2
            break
        assert reader.version == 0
        assert run.correct(reader)
    else:
        pytest.fail("the fetch never succeeded")
    assert run.correct(reader)


def test_a_bit_that_flips_on_the_way_costs_one_request_more(run: Run) -> None:
    publisher = run.publisher()
    run.advance(publisher, 2, share=0.3)
    (key,) = shards(run.store, "delta", 1)
    size = run.store.head(key).size
    for at in [0, 20, 63, 64, 80, 100, size // 2, size - 1]:
        store = Meddling(run.store)
        reader = run.reader(store)
        reader.fetch(0)
        store.calls.clear()
        flipped = threading.Event()

        def flip(name: str, start: int, data: bytes, at: int = at, flipped: threading.Event = flipped) -> bytes:
            if name != key or flipped.is_set():
                return data
            flipped.set()
            return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

        store.damage = flip
        reader.fetch()
        assert run.correct(reader)
        assert len(store.shards_read()) == 2, at


def test_an_object_that_is_cut_on_the_way_is_fetched_again(run: Run) -> None:
    run.advance(run.publisher(), 2)
    store = Meddling(run.store)
    reader = run.reader(store)
    cuts = iter([0, 10, 64, 300, 500])
    store.damage = lambda key, start, data: data[: next(cuts, None)] if key.endswith(".bin") else data
    for _ in range(4):
        with suppress(DeltaError):
            reader.fetch()
    reader.fetch()
    assert run.correct(reader)


def test_a_missing_link_names_itself_and_a_later_full_heals(run: Run) -> None:
    publisher, reader = run.publisher(), run.reader()
    run.advance(publisher, 2)
    reader.fetch()
    run.advance(publisher, 3)
    (lost,) = shards(run.store, "delta", 3)
    run.store.delete(lost)
    with pytest.raises(MissingLink, match="delta of version 3 is missing or damaged") as caught:
        reader.fetch()
    assert lost in str(caught.value.__cause__)
    assert reader.version == 1
    assert run.correct(reader)
    assert reader.fetch(2).advanced
    assert run.correct(reader)
    new = stepped(run.truth[4], run.rng)
    run.truth[5] = new
    publisher.publish(new, version=5, lineage=0, batch=5, parent=run.head, kind="full")
    reader.fetch()
    assert reader.version == 5
    assert run.correct(reader)


def test_a_missing_manifest_names_itself(run: Run) -> None:
    run.advance(run.publisher(), 4)
    run.store.delete("runs/first/main/manifest/000000000002.json")
    with pytest.raises(MissingLink, match=r"manifest 2: .*no object"):
        run.reader().fetch()
    with pytest.raises(NoSuchKey):
        run.reader().fetch(2)


def test_a_pruned_delta_is_replaced_by_the_full_beside_it(tmp_path: Path) -> None:
    run = make_run(LocalStore(tmp_path), full_every=2)
    publisher, reader = run.publisher(), run.reader()
    run.advance(publisher, 2)
    reader.fetch()
    run.advance(publisher)
    run.store.delete(shards(run.store, "delta", 2)[0])
    assert shards(run.store, "full", 2)
    reader.fetch()
    assert reader.version == 2
    assert run.correct(reader)


def test_objects_damaged_in_the_store_are_never_served(tmp_path: Path) -> None:
    """2,000 damaged deltas: each fetch raises and keeps the loaded version, or serves the truth."""
    run = make_run(LocalStore(tmp_path), segment_bytes=2048)
    run.advance(run.publisher(), 2, share=0.3)
    (key,) = shards(run.store, "delta", 1)
    whole = run.store.get(key)
    store = Meddling(run.store)
    reader = run.reader(store)
    reader.fetch(0)
    rng = np.random.default_rng(5)
    damaged = whole
    store.damage = lambda name, start, data: damaged[start : start + len(data)] if name == key else data
    refused = 0
    for number in range(2_000):
        data = bytearray(whole)
        at = int(rng.integers(0, len(data)))
        if number % 3 == 0:
            data[at] ^= 1 << int(rng.integers(0, 8))
        elif number % 3 == 1:
            del data[at:]
        else:
            data[at : at + 16] = rng.bytes(16)
        damaged = bytes(data)
        try:
            reader.fetch(1)
        except DeltaError:
            refused += 1
            assert reader.version == 0
        assert reader.version == 0 or damaged == whole
    assert refused > 1_990
    assert run.correct(reader)
    damaged = whole
    reader.fetch(1)
    assert run.correct(reader)


def test_a_damaged_manifest_is_never_followed(run: Run) -> None:
    run.advance(run.publisher(), 2)
    key = "runs/first/main/manifest/000000000001.json"
    whole = run.store.get(key)
    rng = np.random.default_rng(6)
    for _ in range(200):
        data = bytearray(whole)
        data[int(rng.integers(0, len(data) - 1))] ^= 1 << int(rng.integers(0, 8))
        run.store.put(key, bytes(data))
        reader = run.reader()
        reader.fetch(0)
        with pytest.raises(DeltaCorrupt):
            reader.fetch()
        assert run.correct(reader)


def test_an_announced_manifest_that_is_another_one_is_refused(run: Run) -> None:
    head = run.advance(run.publisher(), 2)
    reader = run.reader()
    with pytest.raises(DeltaCorrupt, match="expected"):
        reader.fetch(1, manifest_sha256="00" * 32)
    assert reader.version == -1
    reader.fetch(1, manifest_sha256=head.manifest_sha256)
    assert run.correct(reader)


def test_a_wrong_base_is_never_built_on(run: Run) -> None:
    publisher, reader = run.publisher(), run.reader()
    run.advance(publisher, 2)
    reader.fetch()
    assert reader._image is not None
    damaged = reader._image.data
    damaged.flags.writeable = True
    damaged[100] ^= 1
    new = {name: array.copy() for name, array in run.truth[1].items()}
    for array in (new["embed"], new["down"]):
        array.reshape(-1)[-1] ^= 1
        run.truth[run.head.version + 1] = new  # type: ignore[union-attr]
        number = run.head.version + 1  # type: ignore[union-attr]
        run.head = publisher.publish(new, version=number, lineage=0, batch=number, parent=run.head)
    loaded = reader.fetch()
    assert loaded.hops == 4
    assert run.correct(reader)


def test_a_reader_of_a_forked_chain_starts_from_a_full(tmp_path: Path) -> None:
    ours, theirs = make_run(LocalStore(tmp_path / "a")), make_run(LocalStore(tmp_path / "b"))
    theirs.rng = np.random.default_rng(99)
    ours.advance(ours.publisher(), 3)
    theirs.advance(theirs.publisher(), 4)
    store = Meddling(ours.store)
    reader = ours.reader(store)
    reader.fetch()
    store.inner = theirs.store
    reader._chain = Chain(store, "first", "main")
    reader.fetch()
    assert reader.version == 3
    assert same(theirs.truth[3], reader.snapshot().weights)


def test_a_crash_in_the_middle_of_applying_leaves_the_loaded_version(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, reader = run.publisher(), run.reader()
    run.advance(publisher)
    reader.fetch()
    run.advance(publisher, 2, share=0.1)
    honest = NumpyKernels.apply
    for nth, error in itertools.product((0, 3, 11), (MemoryError, KeyboardInterrupt)):
        count = itertools.count()

        def crash(*applied: Any, count: Any = count, nth: int = nth, error: Any = error) -> None:
            honest(*applied)
            if next(count) == nth:
                raise error

        monkeypatch.setattr(NumpyKernels, "apply", crash)
        with pytest.raises(error):
            reader.fetch()
        assert reader.version == 0
        assert run.correct(reader)
    monkeypatch.setattr(NumpyKernels, "apply", honest)
    reader.fetch()
    assert reader.version == 2
    assert run.correct(reader)


@pytest.mark.parametrize("hint", [b"", b"junk", b"999999", b"3", b"-4", b"1" * 50])
def test_a_wrong_hint_misleads_nobody(run: Run, hint: bytes) -> None:
    head = run.advance(run.publisher(), 6)
    run.store.put("runs/first/main/LATEST", hint)
    assert run.publisher().head() == head
    reader = run.reader()
    assert reader.head_version() == 5
    assert reader.head_version(hint=5) == 5
    assert reader.head_version(hint=2) == 5
    reader.fetch()
    assert run.correct(reader)


def test_the_chain_verifies_and_damage_is_named(tmp_path: Path) -> None:
    run = make_run(LocalStore(tmp_path), full_every=3)
    run.advance(run.publisher(), 8)
    checked = verify_chain(run.store, "first", "main")
    assert [one.version for one in checked] == list(range(8))
    assert not [one.problem for one in checked if one.problem]
    assert [one.ways for one in checked if "full" in one.ways] == [("full",), ("delta", "full"), ("delta", "full")]
    assert checked[-1].root_digest == run.head.root_digest  # type: ignore[union-attr]
    (key,) = shards(run.store, "delta", 4)
    data = bytearray(run.store.get(key))
    data[-3] ^= 1
    run.store.put(key, bytes(data))
    checked = verify_chain(run.store, "first", "main")
    assert {one.version for one in checked if one.problem} == {4, 5}
    assert "damaged" in checked[4].problem
    assert key in checked[4].problem
    assert [one.ways for one in checked[5:]] == [(), ("delta (read only)", "full"), ("delta",)]
    (beside,) = shards(run.store, "delta", 6)
    data = bytearray(run.store.get(beside))
    data[-2] ^= 4
    run.store.put(beside, bytes(data))
    checked = verify_chain(run.store, "first", "main")
    assert {one.version for one in checked if one.problem} == {4, 5, 6}, "damage beside a full, its parent gone"
    assert beside in checked[6].problem
    assert checked[6].ways == ("full",)


def test_without_a_host_copy_a_snapshot_is_handed_over_once(tmp_path: Path) -> None:
    run = make_run(LocalStore(tmp_path), full_every=3)
    publisher = run.publisher()
    run.advance(publisher, 5)
    reader = WeightReader(run.store, "first", "main", host_copy=False)
    assert reader.fetch().advanced
    snapshot = reader.snapshot()
    assert same(run.truth[4], snapshot.weights)
    assert reader.version == 4
    assert not reader.fetch().advanced
    with pytest.raises(NothingCommitted, match="in memory"):
        reader.snapshot()
    run.advance(publisher)
    loaded = reader.fetch()
    assert (loaded.version.version, loaded.hops) == (5, 3)
    assert same(run.truth[4], snapshot.weights), "what was handed over stays as it is"
    assert run.correct(reader)


def test_connections_are_kept_warm_as_far_as_they_were_used(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_module, "_CHUNK", 300)
    run.advance(run.publisher(), 2, share=0.3)
    store = Meddling(run.store)
    reader = run.reader(store)
    reader.keep_warm()
    assert store.calls == []
    loaded = reader.fetch()
    together = threading.Barrier(min(32, -(-loaded.bytes_read // 300)))
    store.before = lambda verb, key: together.wait(timeout=30) and None  # all at once, or the barrier breaks
    store.calls.clear()
    reader.keep_warm()
    assert [verb for verb, _ in store.calls] == ["head"] * together.parties

    def away(verb: str, key: str) -> None:
        raise StoreUnavailable("refused")

    store.before = away
    reader.keep_warm()


def test_a_run_of_segments_is_read_without_the_rest(either: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    either.advance(either.publisher(), 3, share=0.2)
    store = Meddling(either.store)
    chain, every = Chain(either.store, "first", "main"), range(len(either.layout.segments))
    image = load_image(chain, 2)
    monkeypatch.setattr(image_module, "_CHUNK", 64)
    for start, stop in ((0, 3), (3, len(every)), (2, 2)):
        store.calls.clear()
        data, digests = load_share(Chain(store, "first", "main"), 2, every[start:stop])
        spans = [either.layout.segments[n] for n in every[start:stop]]
        wanted = b"".join(image.data[s.offset : s.offset + s.nbytes].tobytes() for s in spans)
        assert data.tobytes() == wanted
        assert digests == image.digests[start:stop]
    (key,) = shards(either.store, "delta", 1)
    damaged = bytearray(either.store.get(key))
    damaged[-3] ^= 1
    either.store.put(key, bytes(damaged))
    load_share(Chain(either.store, "first", "main"), 2, every[:1])
    with pytest.raises(MissingLink, match="delta of version 1"):
        load_share(Chain(either.store, "first", "main"), 2, every)


def test_a_branch_that_nobody_continued_is_no_problem_of_the_chain(run: Run) -> None:
    """A late writer commits version 1 on version 0; the chain goes on from 0 to 2, past it."""
    first = run.advance(run.publisher())
    late, going_on = run.publisher(), run.publisher()
    run.truth[1], run.truth[2] = stepped(run.truth[0], run.rng), stepped(run.truth[0], run.rng)
    late.publish(run.truth[1], version=1, lineage=0, batch=1, parent=first)
    second = going_on.publish(run.truth[2], version=2, lineage=1, batch=1, parent=first)
    run.truth[3] = stepped(run.truth[2], run.rng)
    going_on.publish(run.truth[3], version=3, lineage=1, batch=2, parent=second)
    checked = verify_chain(run.store, "first", "main")
    assert [(one.version, one.problem) for one in checked] == [(n, "") for n in range(4)]
    reader = run.reader()
    for version in (1, 3, 2, 0):
        reader.fetch(version)
        assert run.correct(reader)
