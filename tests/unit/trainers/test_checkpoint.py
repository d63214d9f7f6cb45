"""Checkpoints are whole or absent."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_a_checkpoint_torn_at_any_byte_of_its_table_is_absent(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    table = write(folder, point(20)) / "checkpoint.json"
    whole = table.read_bytes()
    seen = []
    for length in range(len(whole)):
        table.write_bytes(whole[:length])
        if folder.all():
            seen.append(length)
    assert seen == [len(whole) - 1], "only the newline behind the table may be missing"
    table.write_bytes(whole)
    assert [c.point for c in folder.all()] == [point(20)]


def test_a_checkpoint_whose_file_is_torn_at_any_byte_is_absent(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)

    def save(path: Path) -> None:
        (path / "weights.bin").write_bytes(bytes(range(97)))

    file = folder.write(point(20), POSITIONS, save, Ranks()) / "weights.bin"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert folder.all() == [], f"cut to {length} bytes"
        file.write_bytes(whole[:length] + bytes(len(whole) - length))
        assert folder.all() == [] or whole[length:] == bytes(len(whole) - length), f"zeros from byte {length}"
    file.write_bytes(whole + b"\0")
    assert folder.all() == [], "a byte too many"
    file.write_bytes(whole)
    assert len(folder.all()) == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda table: table.replace("headrace-checkpoint/1", "headrace-checkpoint/2"),
        lambda table: table.replace('"batch"', '"bach"'),
        lambda table: table.replace('"lanes": {', '"lanes": [{').replace("},\n", "}],\n", 1),
        lambda table: table.replace('"0": 40', '"zero": 40'),
        lambda table: "[]",
        lambda table: "null",
        lambda table: table.replace("weights.bin", "other.bin"),
        lambda table: table.replace('"size": 700', '"size": 701'),
    ],
)
def test_a_table_that_says_something_else_is_no_checkpoint(tmp_path: Path, edit: Callable[[str], str]) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    table = write(folder, point(20)) / "checkpoint.json"
    text = table.read_text()
    assert edit(text) != text
    table.write_text(edit(text))
    assert folder.all() == []


@settings(max_examples=40, deadline=None)
@given(
    written=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=8, unique=True),
    keep=st.integers(1, 4),
    base=st.none() | st.tuples(st.integers(0, 2), st.integers(1, 6)),
)
def test_pruning_keeps_the_newest_by_lineage_then_batch_and_the_base(
    written: list[tuple[int, int]], keep: int, base: tuple[int, int] | None
) -> None:
    with TemporaryDirectory() as name:
        folder = CheckpointFolder(Path(name), keep=keep)
        for lineage, batch in written:
            (made := Path(name) / f"{lineage:04d}-{batch:09d}").mkdir()
            table = {"format": "headrace-checkpoint/1", "lineage": lineage, "batch": batch, "version": 9,
                     "manifests": 0, "lanes": {}, "files": {}}  # fmt: skip
            (made / "checkpoint.json").write_text(json.dumps(table))
        folder.prune(None if base is None else point(base[1], base[0]))
        order = sorted(written)
        wanted = {*order[-keep:], *([base] if base in order else [])}
        assert [(c.point.lineage, c.point.batch) for c in folder.all()] == sorted(wanted)


def test_every_rank_saves_its_part_and_positions_of_all_lanes_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    positions = Positions(manifests=0, lanes={lane: 10 * lane for lane in range(12)})

    def save(path: Path) -> None:
        for rank in range(3):
            (path / f"rank-{rank}").mkdir()
            (path / f"rank-{rank}" / "optimizer.bin").write_bytes(bytes([rank]) * (rank + 1))

    folder.write(point(1), positions, save, Ranks())
    (found,) = folder.all()
    assert found.positions == positions
    assert [(found.folder / f"rank-{r}" / "optimizer.bin").stat().st_size for r in range(3)] == [1, 2, 3]
