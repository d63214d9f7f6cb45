"""The scripts behind `make` say what is wrong and keep the status of what they run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(command), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_a_phase_names_itself_and_keeps_the_exit_status() -> None:
    good = run("infra/phase.sh", "greeting", "echo", "hello")
    assert good.returncode == 0
    assert good.stdout.splitlines()[0] == "--- greeting" and "hello" in good.stdout
    assert good.stdout.splitlines()[-1].startswith("--- greeting: ")
    bad = run("infra/phase.sh", "failure", "bash", "-c", "exit 7")
    assert bad.returncode == 7
    assert "exit status 7" in bad.stdout


def test_setup_refuses_a_python_that_is_too_old_before_it_makes_anything(tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = run("infra/setup.sh", tmp_path / "venv", PYTHON=str(old))
    assert done.returncode == 1
    assert "Python 3.11" in done.stderr and str(old) in done.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_with_nothing_changed_returns_at_once(tmp_path: Path) -> None:
    """The stamp is whatever the first call computes; a venv that carries it is left alone, its skips are repeated."""
    script = (ROOT / "infra" / "setup.sh").read_text(encoding="utf-8")
    body = script.split("key=$(")[1].split("\n)\n")[0]
    code = body.split("<<'PY'\n")[1].rsplit("\nPY", 1)[0]
    key = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), "", ""], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "headrace-setup").write_text(key + "\n")
    (venv / "headrace-skips").write_text("rollout-cpu: a reason\n")
    done = run("infra/setup.sh", venv, PYTHON=sys.executable, TORCH_INDEX="", HEADRACE_SKIP_VLLM="")
    assert done.returncode == 0, done.stderr
    assert "up to date (1 skipped)" in done.stdout and "SKIPPED rollout-cpu: a reason" in done.stdout
