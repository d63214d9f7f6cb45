"""The recipe as a person runs it, with few steps: it learns, ends, is verified, is killed and goes on.

Processes are real; nothing is replaced. Each test ends with no process of its run alive and with ``headrace verify``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = Path(sys.executable).with_name("headrace")
RECIPE = "recipes/sort_digits/run.toml"
SHORT = ("trainer.max_steps=6", "eval.every=3", "eval.limit=32", "trainer.batch_groups=8", "trainer.backend=torch")
SECONDS = 500
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sorts sometimes, made once for all tests of this file."""
    out = tmp_path_factory.mktemp("warm") / "model"
    command = [sys.executable, ROOT / "recipes/sort_digits/warm_start.py", "--out", out, "--steps", "150"]
    subprocess.run(command, check=True, timeout=SECONDS, capture_output=True)
    return out


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

    def steps(self, name: str) -> list[dict[str, object]]:
        """Steps that the launcher has noted so far."""
        path = self.run(name) / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["kind"] == "step"]


@pytest.fixture
def runner(tmp_path: Path, warm: Path) -> Iterator[Runner]:
    made = Runner(tmp_path / "runs", warm)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


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


def test_a_run_ends_by_itself_and_leaves_its_folder(runner: Runner) -> None:
    text = ended(runner.recipe("whole"))
    folder = runner.run("whole")
    assert text.splitlines()[-1] == f"run: {folder}"
    assert runner.left_over("whole") == []
    figures = reported(folder)
    assert (figures["versions"], figures["groups_trained"], figures["dead_letters"]) == (6, 48, 0)
    assert figures["accuracy_start"] is not None and figures["accuracy_final"] is not None
    assert "<svg" in (folder / "report.html").read_text()
    assert {path.name for path in (folder / "model").rglob("*")} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    best = json.loads((folder / "best" / "main" / "evaluation.json").read_text())
    evaluation = figures["evaluation"]
    assert isinstance(evaluation, dict) and evaluation["best"] == best and best["version"] in (0, 3, 6)
    weights = [(folder / place / "main" / "model.safetensors").read_bytes() for place in ("best", "model")]
    assert (weights[0] == weights[1]) == (best["version"] == 6)
    assert verified(folder)["every fresh item was trained once in the final lineage"] == 48 * 8
    cat = subprocess.run(
        [HEADRACE, "topics", "cat", "trajectories", "-n", "3", "-f", folder], capture_output=True, text=True, check=True
    )
    assert cat.stdout.count("completion_text") >= 1 and cat.stdout.count("Trajectory  key") == 3
    for part in ("operators-0", "source-main", "trainer-main", "rollout-0"):
        assert f"{part} has finished" in text
    _goes_on_with_a_finished_run(runner)
    _traces_a_trained_prompt(folder)
    _decides_again_as_recorded_and_otherwise_without_operators(folder)
    _trains_again_from_its_batches(runner)


def _goes_on_with_a_finished_run(runner: Runner) -> None:
    """Resuming a run that has ended starts nothing new and ends well."""
    text = ended(runner.start(str(runner.run("whole")), "--resume"))
    assert "run whole has finished: nothing is left to go on with" in text and "rollout-0" not in text
    assert reported(runner.run("whole"))["versions"] == 6
    assert "--from is refused" in ended(runner.start(str(runner.run("whole")), "--resume", "--from", "2"), 78)


def _trains_again_from_its_batches(runner: Runner) -> None:
    """Bit for bit on plain torch, in a folder of its own; the run that it was taken from stays as it was."""
    folder = runner.run("whole")
    before = {
        str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and not {"logs", "broker"} & set(p.parts)
    }
    command = [HEADRACE, "train", "--from-batches", folder, "run.id=again"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout.splitlines()[-1] == f"run: {runner.run('again')}"
    assert "6 batches, the weights of each are the recorded ones" in done.stdout
    models = [path / "model" / "main" / "model.safetensors" for path in (folder, runner.run("again"))]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert before == {name: Path(name).read_bytes() for name in before}
    assert runner.left_over("whole") == runner.left_over("again") == []
    assert "headrace train --resume" in ended(runner.start(str(runner.run("again")), "--resume"), 78)


def _decides_again_as_recorded_and_otherwise_without_operators(folder: Path) -> None:
    def replayed(*words: str) -> dict[str, list[dict[str, object]]]:
        command = [HEADRACE, "replay", *words, "-f", folder, "--format", "json"]
        out: dict[str, list[dict[str, object]]] = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
        return out

    same, other = replayed(), replayed("operators=[]")
    assert same["differences"] == [] and same["groups"] == other["groups"] >= 48
    filtered = [v["groups"] for v in same["verdicts"] if v["recorded"] == "filtered by dynamic_sampling"]
    changed = [d for d in other["differences"] if str(d["recorded"]).startswith("filtered by dynamic_sampling")]
    assert len(changed) == len(other["differences"]) == sum(filtered) > 0  # type: ignore[arg-type]
    assert all(str(d["replayed"]).startswith("kept") and str(d["place"]).startswith("ledger[") for d in changed)
    part = replayed("--offsets", "0:40")
    assert 0 < part["groups"] < same["groups"] and part["differences"] == []


def _traces_a_trained_prompt(folder: Path) -> None:
    read = [HEADRACE, "topics", "cat", "manifests", "-n", "1", "--format", "json", "--full", "-f", folder]
    manifest = json.loads(subprocess.run(read, capture_output=True, text=True, check=True).stdout)
    group = manifest["value"]["members"][0]["group"]
    admissions = [HEADRACE, "topics", "cat", "admissions", "-n", "0", "--format", "json", "-f", folder]
    lines = subprocess.run(admissions, capture_output=True, text=True, check=True).stdout.splitlines()
    values = [json.loads(line) for line in lines]
    prompt = next(
        v["value"]["prompt_id"] for v in values if v["record"] == "Admission" and v["value"]["group"] == group
    )
    done = subprocess.run([HEADRACE, "trace", prompt, "-f", folder], capture_output=True, text=True, check=True)
    for words in (f"admitted as group {group}", "task for", "reward", "kept", "goes into batch 1", "batch 1 trained"):
        assert words in done.stdout


def test_a_finite_dataset_with_dynamic_sampling_ends_with_every_process_exiting_0(
    runner: Runner, tmp_path: Path
) -> None:
    rows = (ROOT / "recipes/sort_digits/train.jsonl").read_text().splitlines()[:40]
    (tmp_path / "few.jsonl").write_text("\n".join(rows) + "\n")
    short = ("trainer.batch_groups=8", "trainer.backend=torch", "eval.every=0", "eval.dataset=")
    text = ended(
        runner.recipe("finite", f"streams.main.dataset={tmp_path / 'few.jsonl'}", "streams.main.epochs=1", short=short)
    )
    for part in ("operators-0", "source-main", "trainer-main", "rollout-0"):
        assert f"{part} has finished" in text
    assert "starting it again" not in text
    counts = verified(runner.run("finite"))
    assert counts["every admitted group ended exactly once"] == counts["no prompt was admitted twice or lost"] == 40


def test_synchronous_training_has_staleness_0_on_every_token(runner: Runner) -> None:
    ended(runner.recipe("sync", "policies.main.depth=0"))
    figures = reported(runner.run("sync"))
    assert figures["max_staleness"] == 0 and figures["loop_latency_ms"] is not None
    assert "staleness is at most 0" in verified(runner.run("sync"))


def test_ctrl_c_leaves_no_process_and_a_run_that_goes_on(runner: Runner) -> None:
    process = runner.recipe("stopped", "trainer.checkpoint_every=2")
    until(lambda: len(runner.steps("stopped")) >= 3, process)
    process.send_signal(signal.SIGINT)
    text = ended(process, 130)
    folder = runner.run("stopped")
    assert f"to go on: headrace run {folder} --resume" in text
    assert runner.left_over("stopped") == []
    verified(folder)
    ended(runner.start(str(folder), "--resume"))
    assert reported(folder)["versions"] == 6
    verified(folder)


def test_ctrl_c_during_the_warm_start_leaves_no_process(runner: Runner, tmp_path: Path) -> None:
    process = runner.start("@", RECIPE, f"run.folder={runner.folder}", "run.id=early")
    until(lambda: (runner.run("early") / "logs" / "warm-start.log").exists(), process)
    process.send_signal(signal.SIGINT)
    ended(process, 130)
    assert runner.left_over("early") == []


def test_a_trainer_killed_again_and_again_trains_no_batch_twice(runner: Runner) -> None:
    process = runner.recipe("killed", "trainer.checkpoint_every=4", "trainer.max_steps=9")
    for wanted in (1, 3, 6):
        until(lambda: len(runner.steps("killed")) >= wanted, process)  # noqa: B023
        os.kill(runner.pid_of("killed", "headrace.trainers"), signal.SIGKILL)
    text = ended(process)
    assert text.count("trainer-main was ended by SIGKILL; starting it again") == 3
    assert reported(runner.run("killed"))["versions"] == 9
    verified(runner.run("killed"))


def test_any_part_may_be_killed_or_stopped_by_hand(runner: Runner) -> None:
    process = runner.recipe("killed", "trainer.max_steps=12")
    modules = ["pipeline.task_to_trajectory", "pipeline.runtime", "pipeline.dataset_to_prompt"]
    for wanted, module in enumerate(modules, 1):
        until(lambda: len(runner.steps("killed")) >= 2 * wanted, process)  # noqa: B023
        os.kill(runner.pid_of("killed", f"headrace.{module}"), signal.SIGKILL)
    until(lambda: len(runner.steps("killed")) >= 8, process)
    os.kill(runner.pid_of("killed", "headrace.pipeline.task_to_trajectory"), signal.SIGTERM)
    until(lambda: len(runner.steps("killed")) >= 9, process)
    os.kill(runner.broker_of("killed"), signal.SIGKILL)
    text = ended(process)
    assert text.count("was ended by SIGKILL; starting it again") == 4
    assert "rollout-0 ended although the run has not; starting it again" in text
    assert verified(runner.run("killed"))["every fresh item was trained once in the final lineage"] == 96 * 8


def test_when_the_launcher_is_killed_its_parts_stop_and_the_run_goes_on(runner: Runner) -> None:
    process = runner.recipe("orphaned")
    until(lambda: len(runner.steps("orphaned")) >= 2, process)
    process.kill()
    process.communicate()
    end = time.monotonic() + 30
    while runner.left_over("orphaned") and time.monotonic() < end:
        time.sleep(0.2)
    assert runner.left_over("orphaned") == []
    refused = ended(runner.start(str(runner.run("orphaned")), "--resume", "run.lanes=8"), 78)
    assert "topics exist with other partition counts" in refused
    ended(runner.start(str(runner.run("orphaned")), "--resume"))
    verified(runner.run("orphaned"))


def test_an_unknown_plug_in_ends_the_run_with_the_reason(runner: Runner) -> None:
    process = runner.recipe("wrong", "streams.main.reward=exact_mach")
    text = ended(process, 78)
    assert "exact_mach" in text and "exact_match" in text


def test_what_only_the_trainer_refuses_leaves_nothing_behind(runner: Runner) -> None:
    text = ended(runner.recipe("refused", "rollout.top_p=0.9"), 78)
    assert "rollout.top_p and rollout.top_k cut the distribution" in text
    assert not runner.run("refused").exists()


def test_a_run_without_workers_says_what_it_waits_for_and_gives_up(runner: Runner) -> None:
    text = ended(runner.recipe("alone", "rollout.workers=0", "run.patience_seconds=33"), 1)
    assert "nothing has moved for 30 s: no Demand yet: no rollout worker is alive" in text
    assert "nothing has moved for 33 s (run.patience_seconds)" in text
    assert runner.left_over("alone") == []
