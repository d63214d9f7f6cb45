"""Several policies: what synchrony costs, whether both of two learn together, and one going on while the other stands.

Runs recipes/solver_verifier as a person would, with every group for both policies, so that the work is the same:
asynchronously, and synchronously (depth 0). Then as it is shipped, without end, with one trainer stopped (SIGSTOP) for
a minute: the rate of the other while it stands beside its rate before, and the groups that were not claimed, from the
report. About six minutes on two idle cores; `--quick` has fewer versions and a stop of ten seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.form import Figure, main

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "solver_verifier" / "run.toml"
TOGETHER = "streams.main.pacing=all"
SYNCHRONOUS = ("policies.solver.depth=0", "policies.verifier.depth=0", TOGETHER)
POLICIES = ("solver", "verifier")
WAYS = ("asynchronous", "synchronous")


def command(parent: Path, name: str, overrides: Sequence[str]) -> list[str]:
    """The words that start a run of the recipe."""
    headrace = str(Path(sys.executable).with_name("headrace"))
    return [headrace, "run", "@", str(RECIPE), f"run.folder={parent}", f"run.id={name}", *overrides]


def steps(folder: Path) -> list[dict[str, Any]]:
    """The Steps that the launcher has noted."""
    path = folder / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    found: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
    return [line for line in found if line["kind"] == "step"]


def training_seconds(folder: Path) -> float:
    """From the first Step of either policy to the last."""
    times = [step["finished_ms"] for step in steps(folder)]
    return (max(times) - min(times)) / 1000


def quarters(folder: Path, policy: int) -> tuple[float, float]:
    """Mean raw reward of what a policy was trained on, over the first and over the last quarter of its versions."""
    rewards = [step["metrics"]["reward/raw_mean"] for step in steps(folder) if step["policy"] == policy]
    part = max(1, len(rewards) // 4)
    return fmean(rewards[:part]), fmean(rewards[-part:])


def run(parent: Path, name: str, overrides: Sequence[str]) -> tuple[dict[str, Any], float]:
    """One run to its end: its report, and the seconds between its first Step and its last."""
    subprocess.run(command(parent, name, overrides), check=True, stdout=subprocess.DEVNULL)
    report: dict[str, Any] = json.loads((parent / name / "report.json").read_text("utf-8"))
    seconds = training_seconds(parent / name)
    print(f"{name}: {seconds:.1f} s between first and last Step", file=sys.stderr)
    return report, seconds


def pid_of(folder: Path, policy: str) -> int:
    """The process of a run's trainer."""
    wanted = {b"headrace.trainers", str(folder / "config.json").encode(), policy.encode()}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if wanted <= set(path.read_bytes().split(b"\0")):
                return int(path.parent.name)
        except OSError:
            continue
    raise RuntimeError(f"no trainer of {policy} in {folder}")


def counted(folder: Path, policy: int) -> int:
    """Steps of a policy so far."""
    return sum(step["policy"] == policy for step in steps(folder))


def wait_for(folder: Path, process: subprocess.Popen[bytes], each: int) -> None:
    """Until both policies have so many Steps."""
    while min(counted(folder, 0), counted(folder, 1)) < each:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode}; its logs are in {folder / 'logs'}")
        time.sleep(0.2)


def stopped_trainer(parent: Path, seconds: float) -> dict[str, float]:
    """Rates of the verifier before and while the solver's trainer stands, in Steps a second; groups not claimed."""
    folder = parent / "stopped"
    overrides = ("trainer.max_steps=100000", "eval.every=0", "eval.dataset=")
    process = subprocess.Popen(command(parent, "stopped", overrides), stdout=subprocess.DEVNULL)
    try:
        wait_for(folder, process, 10)
        before = counted(folder, 1)
        time.sleep(seconds)
        first, trainer, own = counted(folder, 1), pid_of(folder, POLICIES[0]), counted(folder, 0)
        os.kill(trainer, signal.SIGSTOP)
        try:
            time.sleep(seconds)
            last, stood = counted(folder, 1), counted(folder, 0) - own
        finally:
            os.kill(trainer, signal.SIGCONT)
        wait_for(folder, process, counted(folder, 0) + 5)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)
    report = json.loads((folder / "report.json").read_text("utf-8"))
    return {
        "before": (first - before) / seconds,
        "while": (last - first) / seconds,
        "stood": float(stood),
        "unclaimed": float(report["policies"][0]["unclaimed"]),
    }


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """Both ways of running, then the stop."""
    extra = ["trainer.max_steps=12", "eval.every=0", "eval.limit=32"] if given.quick else []
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        report, apart = run(parent, "asynchronous", [TOGETHER, *extra])
        _, together = run(parent, "synchronous", [*SYNCHRONOUS, *extra])
        learned = {name: [quarters(parent / way, at) for way in WAYS] for at, name in enumerate(POLICIES)}
        stop = stopped_trainer(parent, 10.0 if given.quick else 60.0)
    yield Figure(
        "synchronous_over_asynchronous", together / apart, "x", target=1.0, anchor="the same versions and groups"
    )
    yield Figure("asynchronous_seconds", apart, "s", anchor="first to last Step")
    yield Figure("synchronous_seconds", together, "s", anchor="first to last Step")
    for name, ((first, last), (first_apart, last_apart)) in learned.items():
        yield Figure(f"{name}_reward_first", first, anchor="trained on, first quarter of the versions")
        beside = f"last quarter; synchronously {first_apart:.3f} -> {last_apart:.3f}"
        yield Figure(f"{name}_reward_last", last, anchor=beside)
        yield Figure(f"{name}_reward_gain", last - first, target=None if given.quick else 0.05)
    for role, (before, after) in report["policies"][0]["by_role"].items():
        yield Figure(f"{role}_held_out_gain", after - before, anchor=f"held-out, {before:.3f} at version 0")
    yield Figure("rate_while_other_stands", stop["while"] / stop["before"], "x", target=0.9, anchor="its rate before")
    yield Figure("steps_of_who_stands", stop["stood"], target=1, at_least=False, anchor="one may have been under way")
    yield Figure("unclaimed", stop["unclaimed"], "groups", target=1, anchor="named in the report")


if __name__ == "__main__":
    main(__doc__, measure)
