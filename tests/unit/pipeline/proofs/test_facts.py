"""What proofs are told of checkpoints and prompts: whole ones count, halves and held-out rows do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_facts import prompt, whole_run

from headrace.connectors.checkpoints import CheckpointTable
from headrace.connectors.stores.local import LocalStore
from headrace.pipeline.evaluation import EVALUATION_STREAM
from headrace.pipeline.proofs.facts import CheckpointFact, Facts, checkpoint_facts, kept_checkpoints
from headrace.pipeline.verify import prove
from headrace.schemas.config import RunConfig
from headrace.schemas.records import End, Prompt

LOST = "no prompt was admitted twice or lost"


def held_out(position: int) -> Prompt:
    return Prompt(
        prompt_id=f"e{position}", stream=EVALUATION_STREAM, dataset="e", row=position, epoch=0, position=position
    )


def ended_run() -> Facts:
    """A run whose data ended: the ledger has an End and no group was closed by it."""
    facts = whole_run()
    facts.ledger[0].append(End(reason="data", count=5))
    return facts


def breaches(facts: Facts) -> dict[str, tuple[str, ...]]:
    return {proof.name: proof.breaches for proof in prove(facts) if proof.breaches}


def test_held_out_prompts_are_never_admitted_and_that_is_no_loss() -> None:
    facts = ended_run()
    facts.prompts = [(n, held_out(n)) for n in range(3)] + [(n + 3, p) for n, p in facts.prompts]
    for at, admission in enumerate(facts.admissions):
        admission.sources[0] = type(admission.sources[0])(topic="prompts", partition=0, offset=at + 3)
    assert breaches(facts) == {}


def test_a_prompt_that_was_never_admitted_is_lost_once_the_data_has_ended() -> None:
    facts = ended_run()
    facts.prompts.append((5, prompt(5)))
    assert breaches(facts) == {LOST: ("prompts[0]@5 was never admitted",)}


@pytest.mark.parametrize("why", ["not finished", "no End", "stopped by steps", "stopped with nothing open"])
def test_prompts_may_be_left_over_in_a_run_that_did_not_use_up_its_data(why: str) -> None:
    facts = ended_run() if why != "no End" else whole_run()
    facts.prompts.append((5, prompt(5)))
    facts.finished = why != "not finished"
    if why == "stopped with nothing open":
        facts.ledger[0][-1] = End(reason="stopped", policy=0)
    if why == "stopped by steps":
        from run_facts import admission, closed, opened

        facts.admissions.append(admission(6, offset=6))
        facts.admissions.append(admission(5, offset=4, retry=1))
        facts.ledger[0] += [opened(6), closed(6, "end"), opened(5), closed(5, "end")]
    assert LOST not in breaches(facts)


def seal(root: Path, name: str, text: str | None = None, **over: int) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    table = {"lineage": 0, "batch": 3, "version": 4, **over}
    (folder / "checkpoint.json").write_text(json.dumps(table) if text is None else text)
    return folder


def test_checkpoints_are_listed_with_their_points(tmp_path: Path) -> None:
    first, second = seal(tmp_path, "0000-000000003"), seal(tmp_path, "0001-000000002", lineage=1, batch=2, version=9)
    assert list(checkpoint_facts(tmp_path)) == [
        CheckpointFact(lineage=0, batch=3, version=4, place=str(first)),
        CheckpointFact(lineage=1, batch=2, version=9, place=str(second)),
    ]


@pytest.mark.parametrize("cut", range(0, 44, 4))
def test_a_table_cut_at_any_byte_is_no_checkpoint(tmp_path: Path, cut: int) -> None:
    whole = json.dumps({"lineage": 0, "batch": 3, "version": 4})
    seal(tmp_path, "0000-000000003", whole[: min(cut, len(whole) - 1)])
    assert list(checkpoint_facts(tmp_path)) == []


def test_what_a_killed_trainer_was_still_writing_is_no_checkpoint(tmp_path: Path) -> None:
    seal(tmp_path, ".0000-000000006.part", batch=6)
    (tmp_path / "empty").mkdir()
    assert list(checkpoint_facts(tmp_path)) == []
    assert list(checkpoint_facts(tmp_path / "missing")) == []


@pytest.mark.parametrize("text", ["[]", "null", '{"lineage": 0}', '{"lineage": "a", "batch": 1, "version": 1}'])
def test_a_table_of_another_form_is_no_checkpoint(tmp_path: Path, text: str) -> None:
    seal(tmp_path, "0000-000000003", text)
    assert list(checkpoint_facts(tmp_path)) == []


def test_checkpoints_are_those_of_the_place_that_the_configuration_names(tmp_path: Path) -> None:
    """What an earlier setting left in the run folder counts no more."""
    root = tmp_path / "checkpoints" / "main"
    seal(root, "0000-000000050", batch=50)
    table = CheckpointTable(lineage=1, batch=22, version=60, manifests=0, lanes={}, written_ms=0, files={})
    store = LocalStore(tmp_path / "store")
    store.put("checkpoints/first/main/0001-000000022/checkpoint.json", table.to_bytes())
    store.put("checkpoints/first/main/0001-000000024/checkpoint.json", b"torn")
    asked = {
        "run": {"id": "first"}, "policies": {"main": {"model": "m"}},
        "streams": {"s": {"dataset": "train.jsonl", "reward": "exact_match"}},
    }  # fmt: skip
    here = RunConfig.model_validate(asked)
    assert [fact.batch for fact in kept_checkpoints(here, "main", root)] == [50]
    stored = RunConfig.model_validate(asked | {"trainer": {"checkpoint_url": "store"}})
    assert [fact.batch for fact in kept_checkpoints(stored, "main", root)] == [22]
