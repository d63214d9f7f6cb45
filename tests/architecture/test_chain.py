"""The way of the data has no gap: stage files, records, schemas and topics fit together from dataset to worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.schemas.avsc import packaged_schema, schema_of
from headrace.schemas.records import RECORD_TYPES
from headrace.schemas.topics import STORES, SUB_TOPOLOGIES, TOPICS

ROOT = Path(__file__).resolve().parents[2]
CHAIN = ["dataset", "prompt", "task", "trajectory", "group", "batch", "step", "delta", "worker"]
# The record that stands for a word of a stage's name. A batch is what its Manifest says; a delta is announced by Head.
RECORD_OF = {
    "prompt": "Prompt", "task": "Task", "trajectory": "Trajectory", "group": "Group", "batch": "Manifest",
    "step": "Step", "delta": "Head",
}  # fmt: skip
STAGE_OF = {"schedule": "prompt_to_task", "assemble": "trajectory_to_group", "batch": "group_to_batch"}
# Weights leave the trainer before their Step is announced, so this one stage follows its predecessor in one process.
IN_PROCESS = "step_to_delta"


def stages() -> dict[str, tuple[str, str]]:
    """Stage file name -> (what goes in, what comes out)."""
    names = [path.stem for folder in ("pipeline", "trainers") for path in (ROOT / folder).glob("*_to_*.py")]
    assert len(names) == len(set(names)), "a stage stands in two folders"
    return {name: (name.split("_to_")[0], name.split("_to_")[1]) for name in names}


def test_stage_files_form_one_unbroken_chain() -> None:
    after = {first: (second, name) for name, (first, second) in stages().items()}
    assert len(after) == len(stages()), "two stages read the same thing"
    word, seen = CHAIN[0], [CHAIN[0]]
    while word in after:
        word = after[word][0]
        assert word not in seen, f"the chain runs in a circle at {word}"
        seen.append(word)
    assert seen == CHAIN, f"the chain ends at {seen[-1]}"
    assert len(after) == len(CHAIN) - 1, f"stages beside the chain: {set(after) - set(CHAIN)}"


def test_every_stage_says_what_it_is() -> None:
    for name in stages():
        (path,) = [path for folder in ("pipeline", "trainers") for path in (ROOT / folder).glob(f"{name}.py")]
        assert path.read_text(encoding="utf-8").lstrip().startswith(('"""', 'r"""')), f"{path} has no docstring"


@pytest.mark.parametrize("word", list(RECORD_OF))
def test_each_word_of_the_chain_travels_between_its_two_stages(word: str) -> None:
    position = CHAIN.index(word)
    writer, reader = f"{CHAIN[position - 1]}_to_{word}", f"{word}_to_{CHAIN[position + 1]}"
    carrying = [spec for spec in TOPICS if RECORD_OF[word] in spec.records]
    assert carrying, f"no topic carries {RECORD_OF[word]}"
    assert any(writer in spec.writers for spec in carrying), f"{writer} writes no topic with {RECORD_OF[word]}"
    if reader != IN_PROCESS:
        assert any(reader in spec.readers for spec in carrying), f"{reader} reads no topic with {RECORD_OF[word]}"


def test_every_stage_writes_or_reads_a_topic() -> None:
    named = {name for spec in TOPICS for name in (*spec.writers, *spec.readers)}
    assert set(stages()) <= named


def test_writers_and_readers_of_the_map_exist() -> None:
    modules = {path.stem for folder in ("pipeline", "trainers") for path in (ROOT / folder).rglob("*.py")}
    modules |= {path.name for folder in ("pipeline", "trainers") for path in (ROOT / folder).iterdir() if path.is_dir()}
    named = {name for spec in TOPICS for name in (*spec.writers, *spec.readers)}
    assert named - modules == set()


def test_topics_have_distinct_names_writers_and_readers() -> None:
    names = [spec.name for spec in TOPICS]
    assert len(names) == len(set(names))
    for spec in TOPICS:
        assert spec.writers and spec.readers, spec.name


def test_every_record_travels_and_every_topic_carries_known_records() -> None:
    carried = {record for spec in TOPICS for record in spec.records}
    assert carried == set(RECORD_TYPES)


def test_each_record_has_a_schema_of_its_name_that_equals_its_class() -> None:
    files = {path.stem for path in (ROOT / "schemas").glob("*.avsc")}
    assert files == set(RECORD_TYPES)
    for name, cls in RECORD_TYPES.items():
        assert cls.__name__ == name
        assert packaged_schema(name) == schema_of(cls), f"{name}.avsc: run python -m headrace.schemas.avsc"


def test_each_record_shows_an_example() -> None:
    missing = [name for name, cls in RECORD_TYPES.items() if "Example" not in (cls.__doc__ or "")]
    assert not missing


def test_sub_topologies_read_what_the_map_says() -> None:
    assert set(SUB_TOPOLOGIES) == set(STAGE_OF) == set(STORES)
    for sub, inputs in SUB_TOPOLOGIES.items():
        assert {spec.name for spec in TOPICS if STAGE_OF[sub] in spec.readers} == set(inputs), sub
