"""The variants of the recipe differ in nothing but what they are named after, and each can work."""

from __future__ import annotations

import json
import runpy
import shutil
from collections import Counter
from pathlib import Path

import pytest

from headrace.pipeline import flow
from headrace.schemas.config import RunConfig, load_config

FOLDER = Path(__file__).parents[3] / "recipes" / "data_algorithms"
SORT_DIGITS = FOLDER.parent / "sort_digits"
VARIANTS = {
    "vanilla": ([], 0.0),
    "dynamic_sampling": (["dynamic_sampling"], 0.0),
    "replay_0.3": (["dynamic_sampling"], 0.3),
    "replay_0.5": (["dynamic_sampling"], 0.5),
    "replay_0.7": (["dynamic_sampling"], 0.7),
    "greso": (["greso", "dynamic_sampling"], 0.0),
}


def variant(name: str) -> RunConfig:
    return load_config([FOLDER / "run.toml", FOLDER / f"{name}.toml"])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_what_its_name_says(name: str) -> None:
    config = variant(name)
    flow.validate(config)
    operators, replay = VARIANTS[name]
    assert ([entry.type for entry in config.operators], config.policies["main"].replay) == (operators, replay)
    plain = load_config([FOLDER / "run.toml"])
    main = config.policies["main"].model_copy(update={"replay": 0.0})
    assert config.model_copy(update={"operators": [], "policies": {"main": main}}) == plain


def test_there_is_a_file_for_every_variant() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == {*VARIANTS, "run"}


def prompts(path: Path) -> list[str]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert all(row["answer"] == "".join(sorted(row["prompt"].rstrip("="))) for row in rows)
    return [row["prompt"] for row in rows]


def test_the_data_is_what_make_data_makes(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    shutil.copytree(SORT_DIGITS, tmp_path / "sort_digits")
    runpy.run_path(shutil.copy(FOLDER / "make_data.py", tmp_path / "mine"), run_name="__main__")
    assert (tmp_path / "mine" / "train.jsonl").read_bytes() == (FOLDER / "train.jsonl").read_bytes()


def test_three_in_ten_prompts_are_of_the_lengths_of_the_held_out_ones_and_none_is_held_out() -> None:
    train, held_out = prompts(FOLDER / "train.jsonl"), prompts(SORT_DIGITS / "eval.jsonl")
    assert len(set(train)) == len(train) == 240 and not set(train) & set(held_out)
    lengths = {len(prompt) - 1 for prompt in held_out}
    assert Counter(len(prompt) - 1 in lengths for prompt in train) == {True: 72, False: 168}


def test_a_run_trains_as_many_groups_as_the_papers_epochs_have() -> None:
    config = variant("vanilla")
    assert config.trainer.max_samples / config.streams["main"].group_size == 3.2 * len(prompts(FOLDER / "train.jsonl"))
