"""The recipe interrupted and its launcher killed: no process stays, and the run goes on to its end."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from recipe_run import RECIPE, Runner, ended, reported, until, verified

pytestmark = pytest.mark.timeout(600)


def test_ctrl_c_leaves_no_process_and_a_run_that_goes_on(runner: Runner) -> None:
    """Interrupted, and gone on with; then the launcher is killed: its parts stop, and the run goes on once more."""
    process = runner.recipe("stopped", "trainer.checkpoint_every=2", "trainer.max_steps=10")
    until(lambda: len(runner.steps("stopped")) >= 3, process)
    process.send_signal(signal.SIGINT)
    text = ended(process, 130)
    folder = runner.run("stopped")
    assert f"to go on: headrace run {folder} --resume" in text
    assert runner.left_over("stopped") == []
    verified(folder)

    steps = len(runner.steps("stopped"))
    process = runner.start(str(folder), "--resume")
    until(lambda: len(runner.steps("stopped")) > steps, process)
    process.kill()
    process.communicate()
    end = time.monotonic() + 30
    while runner.left_over("stopped") and time.monotonic() < end:
        time.sleep(0.2)
    assert runner.left_over("stopped") == []
    refused = ended(runner.start(str(folder), "--resume", "run.lanes=8"), 78)
    assert "topics exist with other partition counts" in refused

    ended(runner.start(str(folder), "--resume"))
    assert reported(folder)["versions"] == 10
    verified(folder)


def test_ctrl_c_during_the_warm_start_leaves_no_process(runner: Runner, tmp_path: Path) -> None:
    process = runner.start("@", RECIPE, f"run.folder={runner.folder}", "run.id=early")
    until(lambda: (runner.run("early") / "logs" / "warm-start.log").exists(), process)
    process.send_signal(signal.SIGINT)
    ended(process, 130)
    assert runner.left_over("early") == []
