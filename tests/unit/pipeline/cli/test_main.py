"""The command line in its own process: exit codes by kind of error, tables, and commands that need no run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.pipeline.cli import main as command_line
from headrace.pipeline.cli.arguments import command_group, print_table, tidy
from headrace.pipeline.cli.main import COMMANDS, main
from headrace.pipeline.cli.reading import abbreviated, when
from headrace.schemas.errors import ConfigurationError, HeadraceError, InvalidRecord, Superseded

RECIPE = str(Path(__file__).resolve().parents[4] / "recipes" / "sort_digits" / "run.toml")


def headrace(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return int(stopped.value.code or 0)


def raising(error: BaseException) -> typer.Typer:
    """A command group whose only command raises."""
    app = command_group("For a test.", nested=True)

    @app.command()
    def fails() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (HeadraceError("it broke"), 1, "headrace version: it broke\n"),
        (InvalidRecord("bad record"), 1, "headrace version: bad record\n"),
        (ConfigurationError("one\ntwo"), 78, "headrace version: one\n  two\n"),
        (Superseded("another took over"), 75, "headrace version: another took over\n"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(3), 3, ""),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code_and_one_message(
    error: BaseException, status: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.pipeline.cli import version

    monkeypatch.setattr(version, "app", raising(error))
    assert headrace("version", "fails") == status
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith(says) and "Traceback" not in said.err


def test_without_words_the_commands_are_listed_and_unknown_ones_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert headrace("--help") == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in text] == []
    assert headrace() == 0
    assert "Usage: headrace" in capsys.readouterr().out
    assert headrace("reprot") == 2
    assert "No such command 'reprot'" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_entry_of_the_table_is_a_module_with_a_command(name: str) -> None:
    module = command_line.importlib.import_module(COMMANDS[name][0])
    assert isinstance(module.app, typer.Typer) and COMMANDS[name][1]


@pytest.mark.parametrize(
    "words",
    [
        ("topics", "cat"), ("trace",), ("dead-letters", "show", "x"), ("verify",), ("report", "a", "--format", "xml"),
        ("topics", "cat", "ledger", "-n", "-1"), ("run",), ("deltas", "show"), ("operators", "show"),
    ],
)  # fmt: skip
def test_wrong_arguments_exit_with_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace(*words) == 2
    assert capsys.readouterr().err != ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("report", "."), ". is no run folder"),
        (("verify", "missing"), "missing is no run folder"),
        (("topics", "list"), "name one by --folder"),
        (("topics", "cat", "ledger", "--folder", "nowhere"), "nowhere is no run folder"),
        (("trace", "abc", "--run", "other"), "runs/other is no run folder"),
        (("groups", "lag", "-f", "nowhere"), "nowhere is no run folder"),
        (("dead-letters", "list", "-f", "nowhere"), "nowhere is no run folder"),
        (("deltas", "list", "nowhere"), "neither a run folder nor a store"),
        (("run", "nowhere", "--resume"), "nowhere"),
        (("run", "@", "nowhere.toml"), "nowhere.toml"),
        (("run", "@", RECIPE, "--from", "3"), "add --resume"),
        (("run", "@", RECIPE, "trainer.loss=grop", "--dry-run"), "headrace.losses has no 'grop'; did you mean 'grpo'"),
        (("run", "@", RECIPE, "policies.main.trainer.loss=pop", "--dry-run"), "headrace.losses has no 'pop'"),
        (("run", "@", RECIPE, "trainer.advantage=rlo", "--dry-run"), "did you mean 'rloo'"),
        (("run", "@", RECIPE, "rollout.engine=transformer", "--dry-run"), "did you mean 'transformers'"),
        (("run", "@", RECIPE, "streams.main.reward=exact_mach", "--dry-run"), "exact_match"),
        (("run", "@", RECIPE, "trainer.batch_groups=many", "--dry-run"), "trainer.batch_groups"),
        (("run", "@", RECIPE, "policies.main.depth=-1", "--dry-run"), "policies.main.depth"),
        (("flow", "show", "@", RECIPE, "streams.main.workflow=single"), "single_turn"),
        (("flow", "show", "recipe.toml"), "headrace run @"),
        (("operators", "show", "rewards", "exact"), "exact_match"),
        (("operators", "show", "reward", "exact_match"), "rewards"),
    ],
)  # fmt: skip
def test_what_a_person_has_to_change_exits_with_78_and_says_what(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert headrace(*words) == 78
    said = capsys.readouterr()
    assert says in said.err and said.err.startswith(f"headrace {words[0]}: ")
    assert said.out == "" and list(tmp_path.iterdir()) == []


def test_plug_ins_are_listed_with_where_they_come_from_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("operators", "list", "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    kinds = {row["kind"] for row in rows}
    assert {"operators", "rewards", "workflows", "losses", "advantages", "engines", "environments"} <= kinds
    assert all(row["distribution"] == "headrace" and ":" in row["object"] for row in rows)
    assert headrace("operators", "list") == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 1
    for row in rows:
        assert headrace("operators", "show", row["kind"], row["name"]) == 0
        first, _, rest = capsys.readouterr().out.partition("\n\n")
        assert first.split(":")[1] == row["object"].split(":")[1] and rest.strip(), row
        assert "no documentation" not in rest, row


def test_flow_shows_the_stages_and_a_configurations_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("flow", "show") == 0
    every = capsys.readouterr().out
    assert headrace("flow", "show", "@", RECIPE) == 0
    one = capsys.readouterr().out
    for word in ("prompt_to_task", "trajectory_to_group", "group_to_batch", "admissions", "manifests"):
        assert word in every and word in one
    assert one != every


def test_a_dry_run_prints_configuration_and_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("run", "@", RECIPE, f"run.folder={tmp_path}", "run.id=dry", "rollout.workers=2", "--dry-run")
    assert headrace(*words) == 0
    text = capsys.readouterr().out
    config, end = json.JSONDecoder().raw_decode(text)
    assert config["run"]["id"] == "dry" and config["rollout"]["workers"] == 2
    parts = [line.split(":")[0] for line in text[end:].strip().splitlines()]
    assert [name for name in parts if name.startswith("rollout-")] == ["rollout-0", "rollout-1"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_without_addresses_looks_at_the_machine_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("doctor", "--format", "json") == 0
    found = {entry["subject"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["python"]["state"] == "ok" and found["headrace"]["state"] == "ok"
    assert found["kafka"]["state"] == found["store"]["state"] == "note"
    assert "--bootstrap" in found["kafka"]["text"] and "--store" in found["store"]["text"]
    assert headrace("doctor") == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} <= {"ok", "note"}


@pytest.mark.parametrize("store", ["s3://", "ftp://x/y", "/proc/no/such"])
def test_doctor_names_a_store_that_cannot_be_used(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("doctor", "--store", store, "--format", "json") == 1
    bad = [entry for entry in json.loads(capsys.readouterr().out) if entry["state"] == "bad"]
    assert [entry["subject"] for entry in bad] == ["store"]


FIGURES: dict[str, Any] = {
    "run": "first", "accuracy_start": 0.123456, "accuracy_final": None, "rollouts": 12, "drops": {},
    "excluded": {"env_error: it broke": 2}, "mismatch": {"mean": 0.00123456}, "curves": {"reward": [[1, 0.5]]},
    "samples": [],
}  # fmt: skip


def run_folder(parent: Path, figures: dict[str, Any]) -> Path:
    folder = parent / "first"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "report.json").write_text(json.dumps(figures))
    return folder


def test_a_report_that_is_there_is_printed_without_reading_topics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path, FIGURES)
    assert headrace("report", str(folder), "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == FIGURES
    assert headrace("report", str(folder)) == 0
    said = capsys.readouterr()
    shown = {line[:28].strip(): line[28:].strip() for line in said.out.splitlines()}
    assert shown == {
        "run": "first", "accuracy_start": "0.1235", "accuracy_final": "none", "rollouts": "12", "drops": "none",
        "excluded": "env_error: it broke 2", "mismatch": "mean 0.001235",
    }  # fmt: skip
    assert "report.html" in said.err


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ([], ["name  count"]),
        ([("a", 1), ("long name", 20)], ["name       count", "a              1", "long name     20"]),
        ([("a", "x"), ("b", 7)], ["name  count", "a     x", "b     7"]),
        ([("a\nb", 1)], ["name  count", "a b       1"]),
        ([("", 0.5)], ["name  count", "        0.5"]),
    ],
)
def test_a_table_is_as_wide_as_its_cells_with_numbers_at_the_right(
    rows: list[tuple[object, object]], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    print_table(("name", "count"), rows)
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([1] * 8, [1] * 8),
        ([1] * 9, "[1, 1, 1, 1, 1, 1, 1, 1, ... 9 in all]"),
        ([0.123456] * 9, f"[{', '.join(['0.123'] * 8)}, ... 9 in all]"),
        (["a"] * 9, ["a"] * 9),
        ("x" * 400, "x" * 400),
        ("x" * 401, "x" * 400 + "... 401 characters in all"),
        ({"a": {"b": [True] * 9}}, {"a": {"b": f"[{', '.join(['True'] * 8)}, ... 9 in all]"}}),
        ([[1] * 9, "b"], [f"[{', '.join(['1'] * 8)}, ... 9 in all]", "b"]),
        (None, None),
    ],
)
def test_long_values_are_cut_and_say_how_long_they_were(value: Any, shown: Any) -> None:
    assert abbreviated(value, False) == shown
    assert abbreviated(value, True) == value


def test_times_are_local_to_the_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert when(1_764_478_800_007) == "2025-11-30 05:00:00.007"
        assert when(0) == "1970-01-01 00:00:00.000" and when(-1) == "-"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_lines_of_a_message_are_indented() -> None:
    assert tidy("a\nb\nc") == "a\n  b\n  c" and tidy("a") == "a"


def test_a_reader_that_closes_early_gets_no_traceback(tmp_path: Path) -> None:
    import subprocess
    import sys

    folder = run_folder(tmp_path, {**FIGURES, "long": {str(n): n for n in range(60_000)}})
    command = [Path(sys.executable).with_name("headrace"), "report", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(30) in (0, 1)
    assert b"Traceback" not in process.stderr.read()
