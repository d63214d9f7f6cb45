"""The recipes with several policies as a person runs them, with few steps: they end, are proved, pay by the table."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.cli.reading import reading
from headrace.pipeline.flow import validate
from headrace.pipeline.rewards.expression import Expression, ExpressionOptions
from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.solver_selector import choice_of
from headrace.pipeline.workflows.solver_testgen import cases_of
from headrace.pipeline.workflows.solver_verifier import verdict_of
from headrace.schemas.config import load_config
from headrace.schemas.records import Group, Prompt, Trajectory

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = Path(sys.executable).with_name("headrace")
RECIPES = ("solver_verifier", "solver_selector", "solver_testgen")
SHORT = ("trainer.max_steps=2", "trainer.batch_groups=4", "eval.limit=8", "rollout.slots=32", "operators=[]")
SECONDS = 500


def rows(recipe: str, name: str = "train.jsonl") -> list[dict[str, str]]:
    return [json.loads(line) for line in (ROOT / "recipes" / recipe / name).read_text("utf-8").splitlines()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_data_is_what_make_data_makes_and_nothing_held_out_is_trained_on(recipe: str, tmp_path: Path) -> None:
    (tmp_path / recipe).mkdir()
    shutil.copy(ROOT / "recipes" / "tiny_data.py", tmp_path)
    script = shutil.copy(ROOT / "recipes" / recipe / "make_data.py", tmp_path / recipe)
    before, known = list(sys.path), set(sys.modules)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - known:
            del sys.modules[name]
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / recipe / name).read_bytes() == (ROOT / "recipes" / recipe / name).read_bytes()
    train, held_out = rows(recipe), rows(recipe, "eval.jsonl")
    prompts = [row["prompt"] for row in (*train, *held_out)]
    assert (len(train), len(held_out)) == (512, 128) and len(set(prompts)) == 640


def test_answers_of_the_data_are_right() -> None:
    for row in rows("solver_verifier"):
        assert row["answer"] == str(max(int(digit) for digit in row["prompt"].removesuffix("=")))
    for row in rows("solver_selector"):
        a, b = row["prompt"].rstrip("=").replace("-", "+").split("+")
        sign = -1 if "-" in row["prompt"] else 1
        assert row["answer"] == "".join(str((int(x) + sign * int(y)) % 10) for x, y in zip(a, b, strict=True))
    for row in rows("solver_testgen"):
        assert score("solver_testgen", row, row["solution"], "stop") == 1
        shown = [pair.split(":") for pair in row["prompt"].rstrip("=").split(";")]
        case = json.dumps({"inputs": [[int(x)] for x, _ in shown], "outputs": [int(y) for _, y in shown]})
        assert score("solver_testgen", {**row, "answer": case}, row["solution"], "stop") == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_configuration_can_work(recipe: str) -> None:
    validate(load_config([ROOT / "recipes" / recipe / "run.toml"]))


def score(recipe: str, row: dict[str, str], text: str, end: str) -> float:
    """What a completion is worth, by the row alone."""
    if recipe != "solver_testgen":
        return float(end == "stop" and text == row["answer"])
    prompt = Prompt(prompt_id="p", stream="s", dataset="d", row=0, epoch=0, position=0, answer=row["answer"])
    return Expression(ExpressionOptions())(prompt, Completion(text, end))


def expected(recipe: str, row: dict[str, str], said: dict[str, tuple[str, str]]) -> dict[str, float]:
    """What each role should earn, and the outcome, worked out anew from what was said."""
    marks = {role: score(recipe, row, *said[role]) for role in said if role.startswith(("solver", "retry"))}
    if recipe == "solver_verifier":
        verdict = verdict_of(said["verifier"][0])
        assert ("retry" in said) == (verdict == "reject")
        earned = {**marks, "verifier": float(verdict == ("approve" if marks["solver"] else "reject"))}
        return {**earned, "outcome": marks.get("retry", marks["solver"])}
    if recipe == "solver_selector":
        choice = choice_of(said["selector"][0])
        picked = marks["solver_b" if choice == "B" else "solver_a"]
        tie = marks["solver_a"] == marks["solver_b"]
        return {**marks, "selector": 0.0 if not choice else 0.5 if tie else picked, "outcome": picked}
    cases = cases_of(said["tester"][0], 2)

    def passes(text: str, end: str) -> bool:
        made = [json.dumps({"inputs": [c.arguments], "outputs": [c.output]}) for c in cases]
        return all(score(recipe, {"answer": one}, text, end) for one in made)

    program, valid = passes(*said["solver"]), bool(cases) and passes(row["solution"], "stop")
    assert ("retry" in said) == (bool(cases) and not program and not marks["solver"])
    tester = 0.5 * valid + 0.5 * (valid and program == bool(marks["solver"]))
    return {**marks, "tester": tester, "outcome": marks.get("retry", marks["solver"])}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_short_run_ends_is_proved_and_every_role_is_paid_by_the_table(recipe: str, tmp_path: Path) -> None:
    file = ROOT / "recipes" / recipe / "run.toml"
    warm = f"warm_start.command={{python}} {file.parent}/warm_start.py --out {{folder}}/warm --steps 60"
    words = [HEADRACE, "run", "@", file, f"run.folder={tmp_path}", "run.id=short", warm, *SHORT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "short"
    proved = subprocess.run([HEADRACE, "verify", folder], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert proved.returncode == 0, proved.stdout + proved.stderr
    config = load_config([folder / "config.json"])
    first, second = config.policy_names()
    model = ModelFolder(config.policies[first].model)
    by_prompt = {row["prompt"]: row for row in rows(recipe)}
    with reading(str(folder), "", "") as connection:
        results = [raw.decoded() for raw in connection.read_topic("trajectories")]
        groups = [r for raw in connection.read_topic("groups") if isinstance(r := raw.decoded(), Group)]
    usable = [t for t in results if isinstance(t, Trajectory) and t.status == "train"]
    assert len(usable) > 60 and {s.policy for t in usable for s in t.sequences} == {0, 1}
    for t in usable:
        said = {s.role: (model.decode(s.tokens[s.prompt_length :]), s.end_reason) for s in t.sequences}
        paid = {part.role: part.value for part in t.rewards} | {"outcome": t.reward}
        assert paid == expected(recipe, by_prompt[t.prompt_text], said), said
    assert {g.policy for g in groups} == {0, 1}
    assert not any(g.roles for g in groups if g.policy == 1), "the second policy plays one role"
    if recipe == "solver_selector":
        assert all([s.role for s in g.roles] == ["solver_a", "solver_b"] for g in groups if g.policy == 0)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text("utf-8"))
    assert [(p["policy"], p["versions"]) for p in report["policies"]] == [(first, 2), (second, 2)]
    always = {s.role for s in usable[0].sequences} - {"retry"}
    assert {role for role in report["policies"][0]["by_role"] if role != "retry"} == always
    assert "<h2>Policies</h2>" in (folder / "report.html").read_text("utf-8")
