"""What whole runs share: a model that has warmed up, and launchers that end with their test."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from recipe_run import ROOT, SECONDS, Runner


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sorts sometimes, made once for all test processes of a session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warm"
    folder.mkdir(exist_ok=True)
    out = folder / "model"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            command = [sys.executable, ROOT / "recipes/sort_digits/warm_start.py", "--out", out, "--steps", "150"]
            subprocess.run(command, check=True, timeout=SECONDS, capture_output=True)
    return out


@pytest.fixture
def runner(tmp_path: Path, warm: Path) -> Iterator[Runner]:
    """Starts runs from the warm model in a folder of this test."""
    made = Runner(tmp_path / "runs", warm)
    yield made
    made.close()
