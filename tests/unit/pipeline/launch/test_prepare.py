"""From words to a run: ids, resuming, placeholders, the warm start, the run folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.pipeline.launch.folder import RunFolder, Session
from headrace.pipeline.launch.memory import descendants, memory_of
from headrace.pipeline.launch.parts import Rollback, broker_part, parts_of
from headrace.pipeline.launch.prepare import resolve, warm_start
from headrace.schemas.config import RunConfig, dump_config
from headrace.schemas.errors import ConfigurationError

TOML = """
[policies.main]
model = "{folder}/warm"
[streams.main]
dataset = "{here}/train.jsonl"
[warm_start]
command = "{python} {here}/make.py {folder}/warm {seed}"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "Count_Up"
    folder.mkdir()
    (folder / "run.toml").write_text(TOML)
    return folder / "run.toml"


def start(recipe: Path, *overrides: str, resume: bool = False, now: float = 0.0) -> RunConfig:
    folder = f"run.folder={recipe.parent.parent / 'runs'}"
    return resolve([str(recipe)], [folder, *overrides], resume=resume, now=lambda: now)


def made(config: RunConfig) -> RunConfig:
    """Create the run folder as a launcher does."""
    RunFolder.of(config).create()
    dump_config(config, RunFolder.of(config).config)
    return config


def test_a_run_without_an_id_is_named_after_its_recipe_and_the_time(recipe: Path) -> None:
    first, second = start(recipe, now=0.0).run.id, start(recipe, now=3600.0).run.id
    assert first.startswith("count-up-") and first != second


def test_an_id_that_is_set_stays(recipe: Path) -> None:
    assert start(recipe, "run.id=mine").run.id == "mine"


def test_a_run_that_exists_is_refused_unless_resumed(recipe: Path) -> None:
    made(start(recipe, "run.id=mine"))
    with pytest.raises(ConfigurationError, match=r"run mine exists .*--resume"):
        start(recipe, "run.id=mine")
    assert start(recipe, "run.id=mine", resume=True).run.id == "mine"


def test_resume_refuses_a_run_that_does_not_exist(recipe: Path) -> None:
    with pytest.raises(ConfigurationError, match="no run other"):
        start(recipe, "run.id=other", resume=True)
    with pytest.raises(ConfigurationError, match="no run of"):
        start(recipe, resume=True)


def test_resume_without_an_id_takes_the_newest_run_of_the_recipe(recipe: Path) -> None:
    made(start(recipe, now=0.0))
    newest = made(start(recipe, now=7200.0))
    assert start(recipe, resume=True).run.id == newest.run.id


def test_resume_by_folder_takes_the_runs_own_configuration(recipe: Path, tmp_path: Path) -> None:
    config = made(start(recipe, "run.id=mine", "trainer.lr=3e-4"))
    folder = str(RunFolder.of(config).path)
    again = resolve([folder], ["trainer.max_steps=7"], resume=True)
    assert (again.run.id, again.trainer.lr, again.trainer.max_steps) == ("mine", 3e-4, 7)
    assert RunFolder.of(again).path == RunFolder.of(config).path
    with pytest.raises(ConfigurationError, match="add --resume"):
        resolve([folder], [], resume=False)


def test_a_run_folder_that_was_moved_is_found_where_it_lies(recipe: Path, tmp_path: Path) -> None:
    config = made(start(recipe, "run.id=mine"))
    (tmp_path / "elsewhere").mkdir()
    moved = RunFolder.of(config).path.rename(tmp_path / "elsewhere" / "mine")
    assert RunFolder.of(RunFolder.existing(moved).read_config()).path == moved
    with pytest.raises(ConfigurationError, match="is no run folder"):
        RunFolder.existing(tmp_path)


def test_placeholders_are_filled(recipe: Path) -> None:
    config = start(recipe, "run.id=mine")
    assert config.policies["main"].model == str(RunFolder.of(config).path / "warm")
    assert config.streams["main"].dataset == str(recipe.parent / "train.jsonl")
    words = '{command = ["{python}", "{here}/agent.py"], environment = {OUT = "{folder}/out"}, parallel = 4}'
    options = start(recipe, "run.id=mine", f"streams.main.workflow_options={words}").streams["main"].workflow_options
    assert options["command"] == [sys.executable, str(recipe.parent / "agent.py")]
    assert options["environment"] == {"OUT": str(RunFolder.of(config).path / "out")} and options["parallel"] == 4


def test_operators_that_set_depth_and_replicas_stand_in_the_configuration_of_every_part(recipe: Path) -> None:
    entries = '[{type = "admission", alpha = 1.5}, {type = "replicate", extra = 2}]'
    config = made(start(recipe, "run.id=sets", f"operators={entries}"))
    again = RunFolder.of(config).read_config()
    for found in (config, again):
        (policy,), (stream,) = found.policies.values(), found.streams.values()
        assert (policy.depth, policy.max_staleness, stream.extra_replicas) == (1.5, 2, 2)


def test_the_warm_start_runs_once_with_seed_and_folder(recipe: Path) -> None:
    (recipe.parent / "make.py").write_text(
        "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.mkdir(); (p / 'seed').write_text(sys.argv[2])\n"
        "print('made it')"
    )
    config = made(start(recipe, "run.seed=5"))
    said: list[str] = []
    for _ in range(2):
        warm_start(config, sys.executable, said.append, lambda: False)
    assert (RunFolder.of(config).path / "warm" / "seed").read_text() == "5"
    assert said == ["warm start: making the model that the run starts from", "made it"]


def test_a_failing_warm_start_says_what_it_printed(recipe: Path) -> None:
    (recipe.parent / "make.py").write_text("raise SystemExit('no such layer')")
    with pytest.raises(ConfigurationError, match=r"(?s)warm_start\.command ended with 1.*no such layer"):
        warm_start(made(start(recipe)), sys.executable, lambda text: None, lambda: False)


def test_a_model_folder_that_is_missing_in_the_end_is_named(recipe: Path) -> None:
    (recipe.parent / "make.py").write_text("")
    with pytest.raises(ConfigurationError, match=r"no model folder .*warm"):
        warm_start(made(start(recipe)), sys.executable, lambda text: None, lambda: False)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ('"no-such-program --x"', "no program no-such-program"),
        ("true", "True; it must be a command line"),
        ('"make {model}"', r"KeyError\('model'\).*placeholders are {here}, {python}, {folder}, {seed}"),
    ],
)
def test_a_warm_start_that_cannot_start_says_why(recipe: Path, command: str, said: str) -> None:
    config = made(start(recipe, f"warm_start.command={command}"))
    with pytest.raises(ConfigurationError, match=said):
        warm_start(config, sys.executable, lambda text: None, lambda: False)


def test_a_warm_start_ends_with_the_launcher_that_is_killed(recipe: Path, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    (recipe.parent / "make.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(note)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    config = made(start(recipe))
    code = (
        "import sys; from headrace.pipeline.launch.prepare import warm_start; from headrace.schemas.config import *\n"
        "warm_start(read_config(sys.argv[1]), sys.executable, print, lambda: False)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, RunFolder.of(config).config])
    pid = 0
    for _ in range(400):
        pid = int(note.read_text() or 0) if note.exists() else 0
        if pid:
            break
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"warm start {pid} outlived its launcher")


def test_one_launcher_holds_a_folder(recipe: Path) -> None:
    folder = RunFolder.of(made(start(recipe)))
    held = folder.lock()
    with pytest.raises(ConfigurationError, match=f"is running .*process {os.getpid()}"):
        folder.lock()
    os.close(held)
    os.close(folder.lock())


def test_a_warm_start_ends_when_the_run_is_stopped(recipe: Path) -> None:
    (recipe.parent / "make.py").write_text("import time; time.sleep(60)")
    warm_start(made(start(recipe)), sys.executable, lambda text: None, lambda: True)


def test_parts_are_named_by_role_and_number(recipe: Path) -> None:
    config = start(recipe, "rollout.workers=2", "trainer.ranks=2")
    parts = parts_of(config, Path("c.json"), "h:1", rollback=Rollback(7, discard=True))
    assert [(p.name, p.role) for p in parts] == [
        ("operators-0", "operators"), ("source-main", "source"), ("trainer-main", "trainer"),
        ("rollout-0", "rollout"), ("rollout-1", "rollout"),
    ]  # fmt: skip
    assert all("--exit-with-parent" in p.command for p in (*parts, broker_part(Path("b"), 0)))
    trainer = parts[2].command
    assert "torch.distributed.run" in trainer and trainer[-3:] == ("--resume-from", "7", "--discard")
    assert "--resume-from" not in parts_of(config, Path("c.json"), "h:1")[2].command


def test_a_persons_environment_wins_over_the_defaults(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    environment = parts_of(start(recipe), Path("c.json"), "h:1")[1].full_environment()
    assert environment["HF_HUB_OFFLINE"] == "0" and environment["DO_NOT_TRACK"] == "1"


def test_sessions_are_kept_in_order(recipe: Path) -> None:
    folder = RunFolder.of(made(start(recipe)))
    assert folder.sessions() == []
    sessions = [
        Session(started=float(n), wall_seconds=2.0, peak_memory_bytes=n, memory_kind="pss", outcome="o", command="c")
        for n in range(2)
    ]
    for session in sessions:
        folder.add_session(session)
    assert folder.sessions() == sessions


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_memory_is_that_of_a_process_and_its_children() -> None:
    import os
    import subprocess

    code = "x = bytearray(64 << 20); print('up', flush=True); import sys; sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        assert child.pid in descendants([os.getpid()])
        total, kind = memory_of([child.pid])
        assert kind == "pss" and 64 << 20 <= total < 128 << 20
    finally:
        child.communicate(b"")
    assert memory_of([child.pid]) == (0, "pss")
