"""The recipe while its parts are killed and stopped: nothing is trained twice or lost, and the run ends by itself."""

from __future__ import annotations

import os
import signal

import pytest
from recipe_run import Runner, ended, reported, until, verified

pytestmark = pytest.mark.timeout(600)
TRAINER, ROLLOUT = "headrace.trainers", "headrace.pipeline.task_to_trajectory"
KILLS = [
    (1, TRAINER), (1, ROLLOUT), (3, "headrace.pipeline.runtime"), (3, "headrace.pipeline.dataset_to_prompt"),
    (4, TRAINER),
]  # fmt: skip
"""A part is killed when so many steps have been noted; checkpoints are those of batches 3 and 6."""


def test_any_part_may_be_killed_or_stopped_by_hand(runner: Runner) -> None:
    """The trainer before and after a checkpoint; every other part once, two at a time; a worker asked to end."""
    process = runner.recipe("killed", "trainer.max_steps=8", "trainer.checkpoint_every=3")

    def after(steps: int) -> None:
        until(lambda: len(runner.steps("killed")) >= steps, process)

    for steps, module in KILLS:
        after(steps)
        os.kill(runner.pid_of("killed", module), signal.SIGKILL)
    after(5)
    os.kill(runner.pid_of("killed", ROLLOUT), signal.SIGTERM)
    after(6)
    os.kill(runner.broker_of("killed"), signal.SIGKILL)
    text = ended(process)
    assert text.count("trainer-main was ended by SIGKILL; starting it again") == 2
    assert text.count("was ended by SIGKILL; starting it again") == len(KILLS) + 1
    assert "rollout-0 ended although the run has not; starting it again" in text
    assert reported(runner.run("killed"))["versions"] == 8
    assert verified(runner.run("killed"))["every fresh item was trained once in the final lineage"] == 64 * 8
