"""A run folder is found, refused by name, and its notes survive a kill between two writes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.pipeline.launch.folder import RunFolder, Session
from headrace.schemas.config import RunConfig, dump_config
from headrace.schemas.errors import ConfigurationError

SESSION = Session(
    started=1.5, wall_seconds=10.0, peak_memory_bytes=7, memory_kind="pss", outcome="finished", command="headrace run"
)


def made(parent: Path, run: str = "first") -> RunFolder:
    config = RunConfig.model_validate(
        {
            "run": {"id": run, "folder": str(parent)},
            "policies": {"main": {"model": "none"}},
            "streams": {"main": {"dataset": "none"}},
        }
    )
    folder = RunFolder.of(config)
    folder.create()
    dump_config(config, folder.config)
    return folder


def test_a_folder_is_a_runs_by_its_configuration(tmp_path: Path) -> None:
    folder = made(tmp_path)
    assert RunFolder.existing(str(folder.path)) == folder
    for other in (tmp_path, tmp_path / "missing", folder.logs):
        with pytest.raises(ConfigurationError, match="is no run folder"):
            RunFolder.existing(other)


def test_a_moved_folder_reads_its_own_place_and_a_renamed_one_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "runs")
    moved = tmp_path / "elsewhere" / "first"
    moved.parent.mkdir()
    folder.path.rename(moved)
    config = RunFolder.existing(moved).read_config()
    assert config.run_folder() == moved and config.run.folder == str(moved.parent)
    renamed = moved.rename(moved.with_name("second"))
    with pytest.raises(ConfigurationError, match=r"holds run first: name the folder first again"):
        RunFolder.existing(renamed).read_config()


def test_a_relative_folder_reads_as_an_absolute_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs" / "first")
    assert RunFolder.existing(".").read_config().run_folder() == tmp_path / "runs" / "first"


def test_making_it_again_keeps_what_it_holds(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder.logs / "trainer.log").write_text("said")
    folder.create()
    assert (folder.logs / "trainer.log").read_text() == "said"
    assert {p.name for p in folder.path.iterdir() if p.is_dir()} == {
        "logs", "store", "broker", "checkpoints", "model"
    }  # fmt: skip


def test_sessions_add_up_in_order(tmp_path: Path) -> None:
    folder = made(tmp_path)
    assert folder.sessions() == []
    for number in range(3):
        folder.add_session(replace(SESSION, started=float(number), outcome=f"outcome {number}"))
    assert [s.started for s in folder.sessions()] == [0.0, 1.0, 2.0]
    assert folder.sessions()[1] == replace(SESSION, started=1.0, outcome="outcome 1")


def test_sessions_are_replaced_whole_and_never_written_over(tmp_path: Path) -> None:
    folder = made(tmp_path)
    folder.add_session(SESSION)
    before = folder.path / "as it was"
    os.link(folder.sessions_file, before)
    folder.add_session(SESSION)
    assert len(json.loads(before.read_text())) == 1, "a kill while the new notes are written leaves the old ones"
    assert len(folder.sessions()) == 2
    assert not list(folder.path.glob("*.part"))


def test_a_half_written_note_beside_the_sessions_is_not_read(tmp_path: Path) -> None:
    folder = made(tmp_path)
    folder.add_session(SESSION)
    folder.sessions_file.with_suffix(".part").write_text("[{")
    assert folder.sessions() == [SESSION]
    folder.add_session(SESSION)
    assert folder.sessions() == [SESSION, SESSION]


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.write_whole(folder.report_json, "old")
    real = Path.write_text

    def full(self: Path, data: str, *rest: str) -> int:
        real(self, data[: len(data) // 2], *rest)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        folder.write_whole(folder.report_json, "new and longer")
    assert folder.report_json.read_text() == "old"
    monkeypatch.undo()
    folder.write_whole(folder.report_json, "new and longer")
    assert folder.report_json.read_text() == "new and longer"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
