"""Checkpoints are whole or absent."""

from pathlib import Path

import pytest

from headrace.trainers.checkpoint import CheckpointFolder, Positions
from headrace.trainers.lineage import Point
from headrace.trainers.ranks import Ranks

POSITIONS = Positions(manifests=7, lanes={0: 40, 1: 2})


def point(batch: int, lineage: int = 0) -> Point:
    return Point(lineage=lineage, batch=batch, version=batch)


def write(folder: CheckpointFolder, at: Point, text: str = "weights") -> Path:
    def save(path: Path) -> None:
        (path / "inner").mkdir(exist_ok=True)
        (path / "inner" / "weights.bin").write_text(text * 100)

    return folder.write(at, POSITIONS, save, Ranks())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "c", keep=2)
    write(folder, point(10))
    (found,) = folder.all()
    assert (found.point, found.point.version, found.positions) == (point(10), 10, POSITIONS)
    assert (found.folder / "inner" / "weights.bin").read_text() == "weights" * 100


@pytest.mark.parametrize("harm", ["cut", "changed", "missing", "no table", "broken table"])
def test_torn_checkpoints_are_ignored(tmp_path: Path, harm: str) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    write(folder, point(10))
    torn = write(folder, point(20))
    data, table = torn / "inner" / "weights.bin", torn / "checkpoint.json"
    if harm == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    elif harm == "changed":
        data.write_bytes(b"x" + data.read_bytes()[1:])
    elif harm == "missing":
        data.unlink()
    elif harm == "no table":
        table.unlink()
    else:
        table.write_text(table.read_text()[:-20])
    assert [c.point for c in folder.all()] == [point(10)]


def test_a_kill_while_writing_leaves_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    write(folder, point(10))

    def killed(path: Path) -> None:
        (path / "weights.bin").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.write(point(20), POSITIONS, killed, Ranks())
    assert [c.point for c in folder.all()] == [point(10)]
    write(folder, point(20))
    assert [c.point for c in folder.all()] == [point(10), point(20)]


def test_the_newest_and_the_base_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for at in (point(10), point(20), point(30), point(25, 1)):
        write(folder, at)
    folder.prune(point(10))
    assert [c.point for c in folder.all()] == [point(10), point(30), point(25, 1)]
    folder.prune(None)
    assert [c.point for c in folder.all()] == [point(30), point(25, 1)]


def test_the_same_batch_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    write(folder, point(10))
    write(folder, point(10), "other")
    (found,) = folder.all()
    assert (found.folder / "inner" / "weights.bin").read_text() == "other" * 100
