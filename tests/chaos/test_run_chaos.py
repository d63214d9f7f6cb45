"""A whole run whose processes are killed with -9 at random moments, then proved by `headrace verify`.

`python -m benchmarks.chaos` does the same with any number of kills and any seed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KILLS = 20
LIBS = "HEADRACE_KAFKA_LIBS"
KINDS = ["local", *([pytest.param("kafka", marks=pytest.mark.kafka)] if os.environ.get(LIBS) else [])]


@pytest.mark.timeout(900 + 30 * KILLS)
@pytest.mark.parametrize("broker", KINDS)
def test_kills_of_every_part_lose_and_repeat_nothing(broker: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.chaos", "--broker", broker, "--kills", str(KILLS)]
    done = subprocess.run(
        [*command, "--json", str(out), "--keep", str(tmp_path / "run")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(out.read_text())
    broken = {name: figures[name] for name in ("lost", "trained_twice", "wrong_batches", "over_admission")}
    assert broken == dict.fromkeys(broken, 0) and figures["other_breaches"] == 0, done.stderr[-4000:]
    assert (figures["kills"], figures["finished"]) == (KILLS, 1), done.stderr[-4000:]
    killed = {name.removeprefix("kills_") for name in figures if name.startswith("kills_")}
    assert killed == {"broker", "operators_0", "rollout_0", "rollout_1", "source_main", "trainer_main"}
    assert figures["steps"] >= 1


_RUN = """
import sys
from pathlib import Path
from benchmarks.chaos_run import ChaosRun
with ChaosRun(Path(sys.argv[1]), "local", 100_000, None):
    sys.stdin.read()
"""


@pytest.mark.timeout(900)
def test_when_all_rollout_workers_are_dead_the_run_says_so(tmp_path: Path) -> None:
    """Frozen, so that no launcher can start them again: after 30 s the run says what it waits for."""
    process = subprocess.Popen([sys.executable, "-c", _RUN, tmp_path], cwd=ROOT, stdin=subprocess.PIPE)
    metrics, log = tmp_path / "chaos" / "metrics.jsonl", tmp_path / "launcher.log"
    workers: list[int] = []
    try:
        _until(lambda: metrics.exists() and b'"step"' in metrics.read_bytes(), process, "the first step")
        workers = _processes_of(tmp_path / "chaos" / "config.json", "rollout-")
        assert len(workers) == 2
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        alarm = r"nothing has moved for 3\d s: no Demand for \d+ s: no rollout worker is alive"
        _until(lambda: re.search(alarm, log.read_text()), process, alarm)
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        process.communicate(timeout=200)


def _until(condition: Callable[[], object], process: subprocess.Popen[bytes], what: str) -> None:
    end = time.monotonic() + 400
    while not condition():
        assert process.poll() is None, what
        assert time.monotonic() < end, what
        time.sleep(0.1)


def _processes_of(config: Path, name: str) -> list[int]:
    """Processes of a run whose instance name starts so."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        if str(config) in words and any(word.startswith(name) for word in words):
            found.append(int(file.parent.name))
    return found
