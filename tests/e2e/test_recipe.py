"""The recipe as a person runs it, with few steps: it learns, ends, is verified; what it cannot do it says.

Processes are real; nothing is replaced. Each test ends with no process of its run alive and with ``headrace verify``.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from recipe_run import HEADRACE, ROOT, SECONDS, Runner, ended, reported, verified

pytestmark = pytest.mark.timeout(600)


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
