"""The variants of the recipe differ in nothing but what they are named after, and each can work."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.pipeline import flow
from headrace.schemas.config import RunConfig, load_config

FOLDER = Path(__file__).parents[3] / "recipes" / "data_algorithms"
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
