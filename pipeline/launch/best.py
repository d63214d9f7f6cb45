"""The best version of every policy, by its evaluations, as a Hugging Face folder in the run's folder.

In: the figures of a run; out: ``best/POLICY`` with the model and, in ``evaluation.json``, why it is the one. The work
is done by the trainers' own code in a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from headrace.pipeline.evaluated import Best
from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.report_policies import PolicyFigures

__all__ = ("export_best",)

_ABOUT = "evaluation.json"


def export_best(folder: RunFolder, policies: Sequence[PolicyFigures], say: Callable[[str], None]) -> None:
    """Export what was evaluated best; what cannot be exported is said, and an export of an earlier session replaced."""
    for policy in policies:
        best = policy.evaluation.best if policy.evaluation is not None else None
        if best is None or policy.frozen:
            continue
        target = folder.best / policy.policy
        what = f"version {best.version} of {policy.policy}, the best by {best.metric} ({best.value:.3f})"
        if _exported(target) == best:
            continue
        words = ["--config", str(folder.config), "--policy", policy.policy, "--version", str(best.version)]
        command = [sys.executable, "-m", "headrace.trainers.export", *words, "--target", str(target)]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ},
        )  # fmt: skip
        if done.returncode:
            say(f"{what}, could not be exported: {done.stderr.strip()[-500:]}")
            continue
        (target / _ABOUT).write_text(json.dumps(asdict(best), indent=2) + "\n", "utf-8")
        say(f"{what}: {target}")


def _exported(target: Path) -> Best | None:
    """What lies there already; None as well when nobody can say."""
    try:
        return Best(**json.loads((target / _ABOUT).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
