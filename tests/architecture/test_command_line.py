"""The command line answers fast, and every command that the documentation shows exists."""

from __future__ import annotations

import importlib.util
import io
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import pytest

from headrace.pipeline.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = Path(sys.executable).with_name("headrace")
HELP_SECONDS = 0.200  # CPU time, user and system, of one child process


def children_seconds() -> float:
    """CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_takes_at_most_200_ms_of_cpu() -> None:
    """Or on a machine where all is slow half as much again as the command-line library by itself."""
    spent, library = [], []
    for _ in range(9):
        before = children_seconds()
        done = subprocess.run([HEADRACE, "--help"], capture_output=True, text=True, timeout=60, check=True)
        between = children_seconds()
        subprocess.run([sys.executable, "-c", "import typer"], timeout=60, check=True)
        spent.append(between - before)
        library.append(children_seconds() - between)
    assert "run" in done.stdout
    told = f"headrace --help: {1000 * min(spent):.0f} ms CPU, its library {1000 * min(library):.0f} ms (least of 9)"
    print(told)
    assert min(spent) <= max(HELP_SECONDS, 1.5 * min(library)), told


def test_help_goes_to_standard_output_and_a_wrong_command_to_standard_error() -> None:
    wrong = subprocess.run([HEADRACE, "no-such-command"], capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2
    assert "no-such-command" in wrong.stderr and wrong.stdout == ""


@cache
def command_help(*words: str) -> str | None:
    """What `headrace WORDS --help` prints, or None if there is no such command."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(io.StringIO()):
        try:
            main([*words, "--help"])
        except SystemExit as end:
            return None if end.code else said.getvalue()
    return said.getvalue()


def documents() -> list[Path]:
    """Every document of the repository."""
    return sorted(path for path in ROOT.rglob("*.md") if not {".venv", "runs"} & set(path.relative_to(ROOT).parts))


def shell_lines(text: str) -> Iterator[str]:
    """Commands in the shell blocks of a document, continued lines joined, comments cut."""
    for block in re.findall(r"^```(?:sh|shell|bash|console)\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.split(r"\s#\s|^#", line.removeprefix("$ "))[0].strip()
            if command:
                yield command


def shown_commands() -> list[tuple[str, str]]:
    """(document, command) for every shell line of the documentation and every inline `headrace ...`."""
    found = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        inline = re.findall(r"`((?:headrace|make|python -m) [^`\n]+)`", text)
        found += [(name, command) for command in [*shell_lines(text), *inline]]
    return found


def words_of(command: str) -> list[str]:
    """`headrace topics cat trajectories -n 3` -> ["topics", "cat"]: the words that name a command."""
    words: list[str] = []
    for word in command.split()[1:]:
        if not re.fullmatch(r"[a-z][a-z-]*", word) or command_help(*words, word) is None:
            break
        words.append(word)
    return words


def missing_headrace(command: str) -> str | None:
    """The subcommand or option of `headrace ...` that does not exist."""
    words = words_of(command)
    if not words:
        return f"headrace {command.split()[1]}"
    answer = command_help(*words) or ""
    options = re.findall(r"(?<=\s)--[a-z][a-z-]*", " " + command.split("|")[0])
    gone = [option for option in options if option not in answer and option != "--help"]
    return f"headrace {' '.join(words)} {gone[0]}" if gone else None


def missing_target(words: list[str]) -> str | None:
    """The target of `make ...` that does not exist."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    gone = [word for word in words if re.fullmatch(r"[a-z]+", word) and not re.search(rf"^{word}:", makefile, re.M)]
    return f"make {gone[0]}" if gone else None


def missing_part(command: str) -> str | None:
    """What a documented command names that does not exist, or None."""
    program, *rest = command.split()
    program = program.removeprefix(".venv/bin/")
    if program == "headrace" and rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]):
        return missing_headrace(command)
    if program == "make":
        return missing_target(rest)
    if program == "python" and rest[:1] == ["-m"]:
        placeholder = rest[1].rpartition(".")[2].isupper()
        return None if placeholder or module_exists(rest[1]) else f"python -m {rest[1]}"
    script = rest[0] if program == "python" and rest else program
    if script.endswith((".py", ".sh")) or script.startswith((".ci/", "infra/")):
        return None if (ROOT / script).exists() else script
    return None


def module_exists(name: str) -> bool:
    """Whether a module can be found, in the environment or in the repository root (for benchmarks)."""
    if (ROOT / Path(*name.split("."))).with_suffix(".py").exists() or (ROOT / Path(*name.split("."))).is_dir():
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_every_command_in_the_documentation_exists() -> None:
    commands = shown_commands()
    assert any(command.startswith("headrace run") for _, command in commands), "no document shows headrace run"
    missing = sorted({f"{name}: {part}" for name, command in commands if (part := missing_part(command))})
    assert not missing


@pytest.mark.parametrize(
    "command",
    ["headrace fly away", "make tea", "python -m headrace.nothing", "python docs/no.py", "headrace run --nothing x"],
)
def test_a_command_that_does_not_exist_is_seen(command: str) -> None:
    assert missing_part(command) is not None
