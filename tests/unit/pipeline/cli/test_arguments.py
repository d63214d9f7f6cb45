"""What people may type, and what they are told when it cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.kafka import RawRecord
from headrace.pipeline.cli.arguments import compositions
from headrace.pipeline.cli.main import COMMANDS
from headrace.pipeline.cli.reading import abbreviated, newest_run, record_lines
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Sequence, Source
from headrace.schemas.records import Partial, Prompt, Record

ROOT = Path(__file__).resolve().parents[4]
HEADRACE = Path(sys.executable).with_name("headrace")


def headrace(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HEADRACE, *words], capture_output=True, text=True, timeout=60, cwd=cwd, check=False)


@pytest.mark.parametrize(
    ("words", "files", "overrides"),
    [
        (["@", "a.toml"], ["a.toml"], []),
        (["@a.toml", "x=1"], ["a.toml"], ["x=1"]),
        (["@", "a.toml", "b.toml", "x.y=z.toml"], ["a.toml", "b.toml"], ["x.y=z.toml"]),
        (["@a.toml", "@", "b", "x=1", "@c"], ["a.toml", "b", "c"], ["x=1"]),
    ],
)
def test_files_compose_from_left_to_right(words: list[str], files: list[str], overrides: list[str]) -> None:
    assert compositions(words) == (files, overrides)


@pytest.mark.parametrize("words", [["run.toml"], ["@"], ["x=1"], ["@", "a.toml", "oops"]])
def test_words_of_another_form_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="headrace run @"):
        compositions(words)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_answers_help(name: str) -> None:
    done = headrace(name, "--help")
    assert done.returncode == 0 and "Usage: headrace" in done.stdout, done.stderr


def test_a_wrong_key_names_the_nearest_and_exits_78(tmp_path: Path) -> None:
    done = headrace("run", "@", "recipes/sort_digits/run.toml", "trainer.batch_group=8", f"run.folder={tmp_path}")
    assert done.returncode == 78 and "trainer.batch_groups" in done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


def test_dry_run_prints_the_parts_and_starts_nothing(tmp_path: Path) -> None:
    done = headrace("run", "@", "recipes/sort_digits/run.toml", f"run.folder={tmp_path}", "--dry-run")
    assert done.returncode == 0 and "trainer-main: " in done.stdout and '"batch_groups": 32' in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_commands_that_read_say_when_there_is_no_run(tmp_path: Path) -> None:
    done = headrace("topics", "list", cwd=tmp_path)
    assert done.returncode == 78 and "name one by --folder" in done.stderr and done.stdout == ""


def test_the_newest_run_is_taken(tmp_path: Path) -> None:
    import os

    for number, name in enumerate(("second", "first")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        os.utime(tmp_path / name / "config.json", (number, number))
    assert newest_run(tmp_path) == tmp_path / "first"


def raw(record: Record) -> RawRecord:
    return RawRecord(
        topic="prompts", partition=0, offset=7, timestamp_ms=0, key=b"k", value=encode(record),
        headers=[*headers_of(record, "r", "0")],
    )  # fmt: skip


def test_a_record_is_shown_with_text_and_short_arrays() -> None:
    tokens = np.arange(100, dtype=np.int32)
    sequence = Sequence(
        policy=0, role="policy", prompt_length=1, end_reason="stop", oldest_version=1, newest_version=1, tokens=tokens,
        logprobs=np.zeros(100, np.float32), mask=np.ones(100, np.uint8), versions=np.ones(100, np.int32),
    )  # fmt: skip
    record = Partial(group=1, replica=0, attempt=0, worker="w", incarnation=1, written_ms=1, sequences=[sequence])
    short, full = "\n".join(record_lines(raw(record), full=False)), "\n".join(record_lines(raw(record), full=True))
    assert short.startswith("prompts[0]@7") and "Partial  key k" in short
    assert "[0, 1, 2, 3, 4, 5, 6, 7, ... 100 in all]" in short and "98, 99]" in full


def test_text_of_several_lines_stays_on_one() -> None:
    prompt = Prompt(prompt_id="p", stream="s", dataset="d", row=0, epoch=0, position=0, prompt="a\nb")
    assert "  prompt: 'a\\nb'" in record_lines(raw(prompt), full=False)


def test_garbage_is_shown_as_such() -> None:
    garbage = RawRecord(topic="t", partition=0, offset=1, timestamp_ms=-1, key=None, value=b"\x07x", headers=[])
    (line,) = record_lines(garbage, full=False)
    assert line.startswith("t[0]@1  -  key   not decoded: ")


def test_abbreviation_keeps_what_is_short() -> None:
    assert abbreviated({"a": [1, 2], "b": "x", "c": [{"d": "y" * 500}]}, False)["c"][0]["d"].endswith(
        "500 characters in all"
    )
    assert abbreviated([1] * 50, True) == [1] * 50
    assert str(Source(topic="t", partition=1, offset=2)) == "t[1]@2"
