"""The recipe's files: what is committed is what its code makes, and nothing of the evaluation is trained on."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

from headrace.schemas.config import load_config

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "sort_digits"


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (RECIPE / name).read_text("utf-8").splitlines()]


def test_the_data_is_what_make_data_makes(tmp_path: Path) -> None:
    script = shutil.copy(RECIPE / "make_data.py", tmp_path)
    runpy.run_path(script, run_name="__main__")
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (RECIPE / name).read_bytes()


def test_answers_are_right_and_no_prompt_appears_twice() -> None:
    train, held_out = rows("train.jsonl"), rows("eval.jsonl")
    assert (len(train), len(held_out)) == (512, 256)
    prompts = [row["prompt"] for row in (*train, *held_out)]
    assert len(set(prompts)) == len(prompts)
    assert all(row["answer"] == "".join(sorted(row["prompt"].rstrip("="))) for row in (*train, *held_out))
    assert {len(row["answer"]) for row in held_out} == {4, 5, 6}


def test_answers_fit_into_what_may_be_generated() -> None:
    config = load_config([RECIPE / "run.toml"])
    assert config.rollout.max_new_tokens > max(len(row["answer"]) for row in rows("train.jsonl"))
