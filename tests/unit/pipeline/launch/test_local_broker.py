"""Whether a run's broker is live follows from the note in its folder and the process that left it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.launch.local_broker import broker_of, forget_live, live_bootstrap, note_live
from headrace.schemas.config import RunConfig, dump_config


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    config = RunConfig.model_validate(
        {
            "run": {"id": "first", "folder": str(tmp_path)},
            "kafka": {"bootstrap": "cluster:9092"},
            "policies": {"main": {"model": "none"}},
            "streams": {"main": {"dataset": "none"}},
        }
    )
    made = RunFolder.of(config)
    made.create()
    dump_config(config, made.config)
    return made


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(20)
    return process.pid


def test_a_note_holds_as_long_as_the_process_that_left_it(folder: RunFolder) -> None:
    assert live_bootstrap(folder) == ""
    note_live(folder, "127.0.0.1:77")
    assert live_bootstrap(folder) == "127.0.0.1:77"
    note = folder.path / "live.json"
    note.write_text(json.dumps({"bootstrap": "127.0.0.1:77", "launcher": ended_process()}))
    assert live_bootstrap(folder) == ""
    forget_live(folder)
    forget_live(folder)
    assert not note.exists()


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser may signal every process")
def test_a_launcher_of_another_user_is_alive(folder: RunFolder) -> None:
    (folder.path / "live.json").write_text('{"bootstrap": "127.0.0.1:77", "launcher": 1}')
    assert live_bootstrap(folder) == "127.0.0.1:77"


WHOLE = '{"bootstrap": "127.0.0.1:77", "launcher": 1}'


@pytest.mark.parametrize("length", range(0, len(WHOLE), 3))
def test_a_note_cut_at_any_byte_is_none(folder: RunFolder, length: int) -> None:
    (folder.path / "live.json").write_text(WHOLE[:length])
    assert live_bootstrap(folder) == ""


@pytest.mark.parametrize(
    "text", ["[]", "null", "7", '{"launcher": 1.5e99}', '{"bootstrap": "a:1", "launcher": null}',
             '{"bootstrap": "a:1", "launcher": 99999999999999999999999}', '{"bootstrap": "a:1"}', "\xff"]
)  # fmt: skip
def test_a_note_of_another_form_is_none(folder: RunFolder, text: str) -> None:
    (folder.path / "live.json").write_bytes(text.encode("latin-1"))
    assert live_bootstrap(folder) == ""


def test_the_address_given_wins_over_the_configured_one_and_that_over_a_note(folder: RunFolder) -> None:
    note_live(folder, "127.0.0.1:77")
    with broker_of(folder, "given:1") as address:
        assert address == "given:1"
    with broker_of(folder) as address:
        assert address == "cluster:9092"
    assert list(folder.logs.iterdir()) == [], "no broker was started"
