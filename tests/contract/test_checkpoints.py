"""One suite for every place that keeps checkpoints: a shared folder, a local store and S3 (moto's server)."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from thread_ranks import on_ranks

from headrace.connectors.checkpoints import TABLE, BrokenCheckpoint, CheckpointTable
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.open import open_store
from headrace.schemas.config import StoreConfig
from headrace.trainers import checkpoint_store
from headrace.trainers.checkpoint import Place, Positions, Save
from headrace.trainers.checkpoint_folder import FolderPlace
from headrace.trainers.checkpoint_saver import Checkpoints
from headrace.trainers.checkpoint_store import StorePlace
from headrace.trainers.lineage import Point
from headrace.trainers.ranks import Ranks

POSITIONS = Positions(manifests=7, lanes={0: 40, 1: 2})


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


Opener = Callable[[], Place]


@pytest.fixture(params=["folder", "local store", "s3"])
def open_place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Opens the same place again and again, as every process does; files go up in parts of 100 bytes."""
    monkeypatch.setattr(checkpoint_store, "PART_BYTES", 100)
    if request.param == "folder":
        return lambda: FolderPlace(tmp_path / "checkpoints")
    store: Any = LocalStore(tmp_path / "store")
    if request.param == "s3":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        url = f"s3://bucket-{uuid.uuid4().hex[:12]}/prefix"
        store = open_store(StoreConfig(url=url, endpoint_url=request.getfixturevalue("endpoint"), region="us-east-1"))
        store.create_bucket()
    return lambda: StorePlace(store, "checkpoints/run/main", tmp_path / "scratch")


class State:
    """A backend whose whole state is a text for each rank."""

    def __init__(self, ranks: Ranks, text: str = "") -> None:
        self._ranks, self.text = ranks, text

    def snapshot(self) -> "Written":
        return Written(self._ranks.rank, self.text * 150)

    def load(self, folder: Path) -> None:
        self.text = "/".join((folder / "states" / f"{rank}.bin").read_text()[::150] for rank in range(self._ranks.size))


class Written:
    def __init__(self, rank: int, text: str) -> None:
        self._rank, self._text = rank, text

    def write(self, folder: Path) -> None:
        (folder / "states").mkdir()
        (folder / "states" / f"{self._rank}.bin").write_text(self._text)


def point(batch: int, lineage: int = 0) -> Point:
    return Point(lineage=lineage, batch=batch, version=batch)


def checkpoints(place: Place, ranks: Ranks | None = None, text: str = "", **more: Any) -> Checkpoints:
    ranks = ranks or Ranks()
    settings = {"keep": 2, **more}
    return Checkpoints(place, State(ranks, text), ranks, StopSignal(), **settings)  # type: ignore[arg-type]


def save(place: Place, at: Point, text: str = "a", ranks: int = 1) -> None:
    def one(here: Ranks) -> None:
        mine = checkpoints(place, here, f"{text}"[0])
        mine.save(at, POSITIONS)
        mine.settle()
        assert mine.durable == at.batch

    on_ranks(ranks, one)


def batches(place: Place) -> list[tuple[int, int]]:
    return [(one.point.lineage, one.point.batch) for one in place.listed()[0]]


def loaded(place: Place, ranks: int = 1) -> str:
    """What the newest good checkpoint gives back."""
    backends: list[State] = []

    def one(here: Ranks) -> None:
        mine = checkpoints(place, here)
        newest = here.broadcast(next(c for c in reversed(mine.listed()) if mine.verified(c)) if here.leads else None)
        mine.load(newest)
        backends.append(mine._backend)  # type: ignore[arg-type]

    on_ranks(ranks, one)
    assert len({backend.text for backend in backends}) == 1
    return backends[0].text


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_was_saved_is_found_and_loaded_by_others(open_place: Opener, ranks: int) -> None:
    assert open_place().listed() == ([], [])
    save(open_place(), point(10), "x", ranks)
    (found,) = open_place().listed()[0]
    assert (found.point, found.point.version, found.positions) == (point(10), 10, POSITIONS)
    assert set(found.table.files) == {f"states/{rank}.bin" for rank in range(ranks)}
    open_place().check(found)
    assert loaded(open_place(), ranks) == "/".join("x" * ranks)


def test_without_its_table_an_attempt_is_nothing_and_is_swept(open_place: Opener) -> None:
    """A kill between any two writes of an attempt leaves the checkpoint before, and no rubbish after the next start."""
    save(open_place(), point(10))
    half = open_place()
    attempt = Save("0000-000000020", "dead")
    room = half.room(attempt, 0)
    (room / "state.bin").write_bytes(b"half")
    assert batches(open_place()) == [(0, 10)]
    from headrace.connectors.checkpoints import CheckpointFile
    from headrace.trainers.checkpoint import Delivery

    half.deliver(attempt, 0, Delivery({"state.bin": CheckpointFile(4, "ab")}))
    assert batches(open_place()) == [(0, 10)]
    open_place().sweep()
    assert half.delivered(attempt) == {} or not half.delivered(attempt)
    open_place().check(open_place().listed()[0][0])
    save(open_place(), point(20))
    assert batches(open_place()) == [(0, 10), (0, 20)]


def test_the_same_batch_again_replaces_its_checkpoint(open_place: Opener) -> None:
    save(open_place(), point(10), "a")
    save(open_place(), point(10), "b")
    assert batches(open_place()) == [(0, 10)]
    assert loaded(open_place()) == "b"


def test_damage_is_found_and_said_and_an_older_one_has_to_do(
    open_place: Opener, capfd: pytest.CaptureFixture[str]
) -> None:
    save(open_place(), point(10), "a")
    save(open_place(), point(20), "b")
    save(open_place(), point(30), "c")
    damage(open_place(), 30, lambda data: b"")
    damage(open_place(), 20, lambda data: b"z" + data[1:])
    assert loaded(open_place()) == "a"
    said = capfd.readouterr().err
    assert "digest" in said and "000000020" in said and "an older one has to do" in said
    assert "000000030" in said


def damage(place: Place, batch: int, change: Callable[[bytes], bytes]) -> None:
    """Change the first bytes of a checkpoint's state, or with an empty result its table."""
    found = next(c for c in place.listed()[0] if c.point.batch == batch)
    if isinstance(place, FolderPlace):
        file = Path(found.where) / "states" / "0.bin"
        changed = change(file.read_bytes())
        (file if changed else Path(found.where) / TABLE).write_bytes(changed)
        return
    assert isinstance(place, StorePlace)
    key = f"{found.where}/states/0.bin/000000"
    changed = change(place._store.get(key))
    place._store.put(key if changed else f"{found.where}/{TABLE}", changed)


def test_a_lost_file_is_damage_too(open_place: Opener) -> None:
    save(open_place(), point(10))
    place = open_place()
    (found,) = place.listed()[0]
    if isinstance(place, FolderPlace):
        (Path(found.where) / "states" / "0.bin").unlink()
        assert place.listed()[0] == []
    else:
        assert isinstance(place, StorePlace)
        place._store.delete(f"{found.where}/states/0.bin/000001")
    with pytest.raises(BrokenCheckpoint, match=r"0\.bin"):
        place.check(found)


def test_old_ones_go_but_never_the_base_nor_what_is_to_be_kept(open_place: Opener) -> None:
    for at in (point(10), point(20), point(30), point(40), point(25, 1), point(35, 1)):
        save(open_place(), at)
    mine = checkpoints(open_place(), keep_every=40)
    mine.prune(point(20), lineage=1)
    assert batches(open_place()) == [(0, 20), (0, 40), (1, 25), (1, 35)]
    mine.prune(None, lineage=1)
    assert batches(open_place()) == [(0, 40), (1, 25), (1, 35)]


def test_whoever_finds_a_later_lineage_deletes_nothing(open_place: Opener) -> None:
    for at in (point(10), point(20), point(30), point(25, 1)):
        save(open_place(), at)
    checkpoints(open_place(), keep=1).prune(None, lineage=0)
    assert batches(open_place()) == [(0, 10), (0, 20), (0, 30), (1, 25)]


def test_removing_takes_the_table_first(open_place: Opener) -> None:
    save(open_place(), point(10))
    place = open_place()
    (found,) = place.listed()[0]
    place.remove(found)
    assert place.listed() == ([], [])
    place.remove(found)
    assert isinstance(replace(found.table, batch=1), CheckpointTable)
