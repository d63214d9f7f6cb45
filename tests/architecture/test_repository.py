"""What lies in the repository: text that names no machine, scripts that run, a changelog with a place for changes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A checkout directly under one of these has a parent that ordinary text may name.
ORDINARY = {"/", "/tmp", "/home", "/opt", "/srv", "/usr", "/var", "/mnt", "/data", "/src", "/app"}


def repository_files() -> Iterator[Path]:
    """Tracked files and those that would be added, without links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            yield ROOT / name


def texts() -> Iterator[tuple[str, str]]:
    """(path from the root, text) of every file that is text."""
    for path in repository_files():
        data = path.read_bytes()
        if b"\0" not in data:
            yield str(path.relative_to(ROOT)), data.decode("utf-8")


def places(pattern: re.Pattern[str], text: str) -> list[int]:
    """Line numbers on which the pattern is found."""
    return [number for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


def machine_pattern(root: Path) -> re.Pattern[str]:
    """What would tell on which machine this was written: people's folders, the checkout's place, private hosts."""
    parts = [r"/home/[a-z]\w+/", r"/Users/[A-Za-z]\w+/", r"(?<![\w.}$])/root/"]
    parts.append(r"(?<![\w.-])(?!host\.docker\.)[\w.-]+\.(?:internal|corp|intranet|localdomain)\b(?!\.)")
    own = [str(place) for place in (root, root.parent) if str(place) not in ORDINARY]
    parts += [r"(?<![\w.}-])" + re.escape(place) + r"(?![\w-])" for place in own]
    return re.compile("|".join(parts))


def test_no_file_names_a_machine() -> None:
    pattern = machine_pattern(ROOT)
    here = str(Path(__file__).relative_to(ROOT))
    found = [f"{name}:{line}" for name, text in texts() if name != here for line in places(pattern, text)]
    assert not found


@pytest.mark.parametrize(
    "line",
    ["see /home/alice/x", "at /Users/bob/y", "in /root/.cache", "on build7.corp", "in /code/one/src", "/code/one"],
)
def test_a_planted_machine_path_is_seen(line: str) -> None:
    assert places(machine_pattern(Path("/code/one/headrace")), line) == [1]


@pytest.mark.parametrize(
    "line", ["/var/lib/kafka", "host.docker.internal:9464", "a/code/one", "${HOME}/x", "/code/oneself"]
)
def test_an_ordinary_path_is_not(line: str) -> None:
    assert places(machine_pattern(Path("/code/one/headrace")), line) == []


def test_no_compiled_or_oversized_file_is_tracked() -> None:
    for path in repository_files():
        assert path.suffix not in (".pyc", ".pyo", ".so", ".whl"), path
        assert path.stat().st_size <= 1_000_000, f"{path} has {path.stat().st_size} bytes"


def test_text_files_are_utf8_with_unix_lines_and_a_last_newline() -> None:
    """Data files in JSON may come from other programs and end as they like."""
    for name, text in texts():
        assert "\r" not in text, name
        assert text == "" or text.endswith("\n") or name.endswith(".json"), name
        assert not places(re.compile("^(<{7}|>{7}) "), text), f"{name} has a conflict mark"


def test_scripts_can_be_executed_and_parse() -> None:
    for path in repository_files():
        if path.suffix == ".sh" or path == ROOT / ".ci" / "run":
            assert os.access(path, os.X_OK), path
            subprocess.run(["bash", "-n", path], check=True)


def test_the_changelog_has_a_place_for_changes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(r"^## \[(Unreleased|0\.1\.0)\][^\n]*\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section is not None
    assert re.search(r"^- ", section[2], re.M), "the newest section is empty"


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M)
    assert phony is not None
    shown = subprocess.run(["make", "--silent", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make (\w+)", shown, re.M)) == set(phony[1].split())


def test_unit_tests_mirror_the_tree() -> None:
    unit = ROOT / "tests" / "unit"
    strays = [
        str(folder.relative_to(ROOT))
        for folder in sorted(unit.rglob("*"))
        if folder.is_dir() and folder.name != "__pycache__" and not (ROOT / folder.relative_to(unit)).is_dir()
    ]
    assert not strays, "no source folder of that name"
