"""Saves beside training: what fails is said and tried again, what hangs delays nobody, what is stopped never counts."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from thread_ranks import on_ranks

from headrace.connectors.checkpoints import BrokenCheckpoint, CheckpointTable
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.store import StoreUnavailable
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.checkpoint import Delivery, Positions, Save
from headrace.trainers.checkpoint_folder import FolderPlace
from headrace.trainers.checkpoint_saver import Checkpoints
from headrace.trainers.checkpoint_store import StorePlace
from headrace.trainers.lanes import Stopped
from headrace.trainers.lineage import Point
from headrace.trainers.ranks import Ranks

POSITIONS = Positions(manifests=1, lanes={0: 1})


def point(batch: int) -> Point:
    return Point(lineage=0, batch=batch, version=batch)


class Disk:
    """What happens to writers: they wait for ``open``, and raise ``error`` if there is one."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.error: dict[int, OSError] = {}


class State:
    """A backend with a number for a state; ``snapshot`` copies it."""

    def __init__(self, disk: Disk, rank: int = 0) -> None:
        self.disk, self.rank, self.value = disk, rank, 0

    def snapshot(self) -> "Copied":
        return Copied(self.disk, self.rank, self.value)

    def load(self, folder: Path) -> None:
        self.value = int((folder / f"{self.rank}.txt").read_text())


class Copied:
    def __init__(self, disk: Disk, rank: int, value: int) -> None:
        self._disk, self._rank, self._value = disk, rank, value

    def write(self, folder: Path) -> None:
        assert self._disk.open.wait(30)
        if self._rank in self._disk.error:
            (folder / "half.txt").write_text("half")
            raise self._disk.error[self._rank]
        (folder / f"{self._rank}.txt").write_text(str(self._value))


FULL = OSError(28, "No space left on device")


def open_at(root: Path, state: Any, ranks: Ranks | None = None, **more: Any) -> Checkpoints:
    return Checkpoints(FolderPlace(root), state, ranks or Ranks(), more.pop("stop", StopSignal()), keep=2, **more)


def batches(root: Path) -> list[int]:
    return [one.point.batch for one in FolderPlace(root).listed()[0]]


def test_training_goes_on_while_a_copy_of_the_state_is_written(tmp_path: Path) -> None:
    state = State(disk := Disk())
    mine = open_at(tmp_path, state)
    state.value = 7
    disk.open.clear()
    mine.save(point(10), POSITIONS)
    state.value = 8
    assert (mine.poll(), mine.durable, batches(tmp_path)) == (False, -1, [])
    disk.open.set()
    mine.settle()
    assert (mine.poll(), mine.durable, batches(tmp_path)) == (True, 10, [10])
    again = State(Disk())
    other = open_at(tmp_path, again)
    other.load(other.listed()[0])
    assert (again.value, other.durable) == (7, 10)
    figures = mine.figures()
    assert 0 <= figures["checkpoint/copy_seconds"] <= figures["checkpoint/seconds"]
    assert mine.figures() == {}, "told once"


def test_without_beside_it_is_durable_when_save_returns(tmp_path: Path) -> None:
    mine = open_at(tmp_path, State(Disk()), beside=False)
    mine.save(point(10), POSITIONS)
    assert (mine.durable, batches(tmp_path)) == (10, [10])


def test_what_is_due_while_a_save_is_under_way_comes_after_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = open_at(tmp_path, State(disk := Disk()))
    disk.open.clear()
    assert not mine.due(9, 10) and mine.due(10, 10)
    mine.save(point(10), POSITIONS)
    assert not mine.due(20, 10) and not mine.due(21, 10)
    assert capfd.readouterr().err.count("still being written") == 1
    disk.open.set()
    mine.settle()
    assert mine.due(22, 10), "the one that was put off"
    mine.save(point(22), POSITIONS)
    mine.settle()
    assert batches(tmp_path) == [10, 22] and not mine.due(23, 10)


def test_a_full_disk_costs_the_checkpoint_and_not_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = open_at(tmp_path, State(disk := Disk()))
    mine.save(point(10), POSITIONS)
    mine.settle()
    disk.error[0] = FULL
    tried = []
    for batch in range(20, 30):
        if mine.due(batch, 20):
            mine.save(point(batch), POSITIONS)
            mine.settle()
            tried.append(batch)
    assert tried == [20, 21, 23, 27], "pauses grow"
    assert (mine.durable, batches(tmp_path)) == (10, [10])
    assert mine.figures()["checkpoint/failed"] == 4
    said = capfd.readouterr().err
    assert "No space left" in said and "the newest is of batch 10" in said and "training goes on" in said
    assert [path.name for path in tmp_path.iterdir()] == ["0000-000000010"], "its space was freed"
    disk.error.clear()
    mine.save(point(35), POSITIONS)
    mine.settle()
    assert batches(tmp_path) == [10, 35] and not mine.due(36, 20)


def test_the_last_checkpoint_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.trainers.checkpoint_saver._RETRY_SECONDS", 0.01)
    disk = Disk()
    disk.error[0] = FULL
    mine = open_at(tmp_path, State(disk))
    threading.Timer(0.2, disk.error.clear).start()
    mine.save_last(point(10), POSITIONS)
    assert (mine.durable, batches(tmp_path)) == (10, [10])
    mine.save_last(point(10), POSITIONS)
    assert mine.figures()["checkpoint/failed"] >= 1


def test_a_stop_ends_the_wait_for_the_last_checkpoint(tmp_path: Path) -> None:
    disk, stop = Disk(), StopSignal()
    disk.error[0] = FULL
    mine = open_at(tmp_path, State(disk), stop=stop)
    threading.Timer(0.1, lambda: stop.set("SIGTERM")).start()
    with pytest.raises(Stopped, match="SIGTERM"):
        mine.save_last(point(10), POSITIONS)
    assert batches(tmp_path) == []


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_cannot_write_takes_the_checkpoint_from_all(
    tmp_path: Path, failing: int, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = Disk()
    disk.error[failing] = FULL

    def one(ranks: Ranks) -> tuple[int, bool]:
        mine = open_at(tmp_path, State(disk, ranks.rank), ranks)
        mine.save(point(10), POSITIONS)
        mine.settle()
        return mine.durable, mine.due(11, 10)

    assert on_ranks(3, one) == [(-1, True)] * 3
    assert batches(tmp_path) == []
    said = capfd.readouterr().err
    assert f"rank {failing}" in said and said.count("training goes on") == 1


class Deaf(FolderPlace):
    """A place in which rank 1 can leave nothing, not even that it failed."""

    def room(self, save: Save, rank: int) -> Path:
        """See ``Place``."""
        if rank == 1:
            raise PermissionError(13, "Permission denied")
        return super().room(save, rank)

    def deliver(self, save: Save, rank: int, delivery: Delivery) -> None:
        """See ``Place``."""
        if rank == 1:
            raise PermissionError(13, "Permission denied")
        super().deliver(save, rank, delivery)


def test_a_rank_that_cannot_even_say_so_keeps_nobody_waiting(tmp_path: Path) -> None:
    def one(ranks: Ranks) -> int:
        mine = Checkpoints(Deaf(tmp_path), State(Disk(), ranks.rank), ranks, StopSignal(), keep=2)  # type: ignore[arg-type]
        mine.save(point(10), POSITIONS)
        mine.settle()
        return mine.durable

    assert on_ranks(2, one) == [-1, -1]
    assert batches(tmp_path) == []


def test_a_stop_leaves_what_is_unfinished_no_checkpoint(tmp_path: Path) -> None:
    disk, stop = Disk(), StopSignal()
    mine = open_at(tmp_path, State(disk), stop=stop)
    disk.open.clear()
    mine.save(point(10), POSITIONS)
    stop.set("SIGTERM")
    began = time.monotonic()
    mine.close(0.1)
    assert time.monotonic() - began < 10
    assert batches(tmp_path) == []
    disk.open.set()


class Together:
    """A backend without snapshots: its ranks write into one folder at once."""

    def __init__(self, rank: int) -> None:
        self.rank, self.value = rank, rank + 1

    def save(self, folder: Path) -> None:
        (folder / f"{self.rank}.txt").write_text(str(self.value))

    def load(self, folder: Path) -> None:
        self.value = int((folder / f"{self.rank}.txt").read_text())


def test_a_backend_without_snapshots_is_saved_by_all_ranks_together(tmp_path: Path) -> None:
    def one(ranks: Ranks) -> int:
        state = Together(ranks.rank)
        mine = open_at(tmp_path, state, ranks)
        mine.save(point(10), POSITIONS)
        mine.settle()
        state.value = 0
        mine.load(ranks.broadcast(mine.listed()[0] if ranks.leads else None))
        return state.value

    assert on_ranks(3, one) == [1, 2, 3]
    assert batches(tmp_path) == [10]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    end = time.monotonic() + 20
    while any(thread.name == "checkpoint" for thread in threading.enumerate()):
        assert time.monotonic() < end, "a save never ends"
        time.sleep(0.01)


def test_going_back_deletes_what_is_beyond(tmp_path: Path) -> None:
    mine = open_at(tmp_path, State(Disk()), beside=False)
    for batch in (10, 20, 30):
        mine.save(point(batch), POSITIONS)
    mine.forget_after(20)
    assert batches(tmp_path) == [10, 20]


class LateFailure(FolderPlace):
    """A place in which rank 1's call fails after it has delivered, once rank 0 has made the checkpoint."""

    done = threading.Event()

    def commit(self, save: Save, table: CheckpointTable) -> None:
        """See ``Place``."""
        super().commit(save, table)
        self.done.set()

    def deliver(self, save: Save, rank: int, delivery: Delivery) -> None:
        """See ``Place``."""
        if not self.done.is_set():
            super().deliver(save, rank, delivery)
        if rank == 1:
            assert self.done.wait(30)
            raise OSError(5, "Input/output error")


def test_a_rank_that_fails_after_it_has_delivered_has_delivered(tmp_path: Path) -> None:
    place = LateFailure(tmp_path)

    def one(ranks: Ranks) -> tuple[int, bool]:
        mine = Checkpoints(place, State(Disk(), ranks.rank), ranks, StopSignal(), keep=2)  # type: ignore[arg-type]
        mine.save(point(10), POSITIONS)
        mine.close(30)  # whoever asks first, the thread has ended
        mine.settle()
        return mine.durable, "checkpoint/seconds" in mine.figures()

    assert on_ranks(2, one) == [(10, True), (10, False)]
    assert batches(tmp_path) == [10]


class Away(LocalStore):
    """A store that fails at the first put of every key."""

    asked: ClassVar[set[str]] = set()

    def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        """See ``ObjectStore``."""
        if key not in self.asked:
            self.asked.add(key)
            raise StoreUnavailable("the store is away")
        super().put(key, data, create_only=create_only)


def test_a_store_that_is_away_for_a_moment_costs_no_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state, scratch = State(Disk()), tmp_path / "scratch"
    place = StorePlace(Away(tmp_path / "store"), "checkpoints/run/main", scratch)
    mine = Checkpoints(place, state, Ranks(), StopSignal(), keep=2, beside=False)  # type: ignore[arg-type]
    state.value = 7
    mine.save(point(10), POSITIONS)
    assert mine.durable == 10 and "waiting for the object store" in capfd.readouterr().err
    state.value = 0
    mine.load(mine.listed()[0])
    assert state.value == 7
    assert not list(scratch.glob(".*.part"))


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file"), ConfigurationError("it is not there")])
@pytest.mark.parametrize("gone", [True, False])
def test_a_checkpoint_that_goes_while_it_is_loaded_is_no_mistake_of_the_configuration(
    tmp_path: Path, gone: bool, error: Exception
) -> None:
    class Loads(State):
        def load(self, folder: Path) -> None:
            if gone:
                shutil.rmtree(folder)
            raise error

    mine = open_at(tmp_path, Loads(Disk()), beside=False)
    mine.save(point(10), POSITIONS)
    with pytest.raises(BrokenCheckpoint if gone else type(error), match="start again" if gone else "(?i)no") as raised:
        mine.load(mine.listed()[0])
    assert isinstance(raised.value, ConfigurationError) == (not gone and isinstance(error, ConfigurationError))
