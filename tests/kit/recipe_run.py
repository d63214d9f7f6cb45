"""Recipes as a person starts them: launchers in a folder, what is left of them, and what they leave behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = Path(sys.executable).with_name("headrace")
RECIPE = "recipes/sort_digits/run.toml"
SHORT = ("trainer.max_steps=6", "eval.every=3", "eval.limit=32", "trainer.batch_groups=8", "trainer.backend=torch")
SECONDS = 500


class Runner:
    """Starts launchers in a folder and ends what is left of them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        """``headrace run`` with these words, in a process group of its own."""
        process = subprocess.Popen(
            [HEADRACE, "run", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def recipe(self, name: str, *overrides: str, short: tuple[str, ...] = SHORT) -> subprocess.Popen[str]:
        """A new run of the recipe from the shared model."""
        own = (f"run.folder={self.folder}", f"run.id={name}", f"policies.main.model={self.model}")
        return self.start("@", RECIPE, *own, *short, *overrides)

    def run(self, name: str) -> Path:
        return self.folder / name

    def left_over(self, name: str) -> list[str]:
        """Command lines of processes that name a run's folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if f"{self.run(name)}/" in words and "headrace" in words:
                found.append(words)
        return found

    def pid_of(self, name: str, module: str) -> int:
        """The process of a part of a run."""
        return self._pid(module, self.run(name) / "config.json")

    def broker_of(self, name: str) -> int:
        """The process of a run's broker."""
        return self._pid("headrace.connectors.broker", self.run(name) / "broker")

    def _pid(self, module: str, argument: Path) -> int:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if module.encode() in words and str(argument).encode() in words:
                return int(path.parent.name)
        raise AssertionError(f"no process of {module}")

    def close(self) -> None:
        """End launchers that still run."""
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)

    def steps(self, name: str) -> list[dict[str, object]]:
        """Steps that the launcher has noted so far."""
        path = self.run(name) / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["kind"] == "step"]


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """What a launcher printed; it must end with ``code``."""
    text, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == code, text
    return text


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"not within {SECONDS} s"
        time.sleep(0.1)


def verified(folder: Path) -> dict[str, int]:
    """Counts by property; every property must hold."""
    done = subprocess.run(
        [HEADRACE, "verify", folder, "--format", "json"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {proof["name"]: proof["count"] for proof in json.loads(done.stdout)["properties"]}


def reported(folder: Path) -> dict[str, object]:
    done = subprocess.run(
        [HEADRACE, "report", folder, "--format", "json"], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    figures: dict[str, object] = json.loads(done.stdout)
    return figures
