"""Each proof holds for a whole run and sees the one thing that is broken in a broken one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from run_facts import admission, closed, manifest, opened, prompt, step, whole_run

from headrace.pipeline.proofs.facts import CheckpointFact, Facts, Proof, item_fact
from headrace.pipeline.verify import prove
from headrace.schemas.parts import Sequence, Source
from headrace.schemas.records import (
    Batched,
    Closed,
    End,
    Item,
    Kept,
    Opened,
    Resumed,
    Rollback,
    Skipped,
    Step,
    Trained,
)


def broken(facts: Facts) -> dict[str, Proof]:
    """Proofs that fail, by their name."""
    return {proof.name: proof for proof in prove(facts) if proof.breaches}


def test_a_whole_run_holds_and_every_proof_has_counted_something() -> None:
    proofs = prove(whole_run())
    assert [p for p in proofs if p.breaches] == []
    counts = {p.name: p.count for p in proofs}
    assert counts["every admitted group ended exactly once"] == 5
    assert counts["every fresh item was trained once in the final lineage"] == 8
    assert counts["lanes hold what their manifests say"] == 8
    assert [name for name, count in counts.items() if count == 0] == ["every replayed use has one manifest entry"]


def _insert(at: int, record: object) -> Callable[[Facts], None]:
    return lambda facts: facts.ledger[0].insert(at, record)  # type: ignore[arg-type]


def _drop(kind: type, group: int | None = None) -> Callable[[Facts], None]:
    def apply(facts: Facts) -> None:
        for at, record in enumerate(facts.ledger[0]):
            if isinstance(record, kind) and (group is None or record.group == group):  # type: ignore[attr-defined]
                del facts.ledger[0][at]
                return

    return apply


def _second_manifest(facts: Facts) -> None:
    facts.manifests[0].append(facts.manifests[0][0])


def _group_in_two_batches(facts: Facts) -> None:
    record, fact = manifest(2, (0, 3, 4), oldest=0)
    facts.manifests[0][1] = record
    facts.lanes[0][2, 0] = fact


def _item_missing(facts: Facts) -> None:
    facts.lanes[0][1, 0].items.pop()


def _item_changed(facts: Facts) -> None:
    facts.lanes[0][1, 0].digest.update(b"x")


def _items_swapped(facts: Facts) -> None:
    items = facts.lanes[0][1, 0].items
    items[0], items[1] = items[1], items[0]


def _lane_without_manifest(facts: Facts) -> None:
    facts.lanes[0][9, 0] = facts.lanes[0][1, 0]


def _too_old(facts: Facts) -> None:
    facts.bounds[0] = 0


def _older_token(facts: Facts) -> None:
    items = facts.lanes[0][2, 0].items
    items[0] = replace(items[0], oldest_token=-5)


def _steps(*records: Step | Rollback | Resumed) -> Callable[[Facts], None]:
    def apply(facts: Facts) -> None:
        facts.steps[0] = list(records)

    return apply


def _replay(use: int) -> Callable[[Facts], None]:
    def apply(facts: Facts) -> None:
        record, fact = manifest(3, (0,), oldest=2, use=use)
        facts.manifests[0].append(record)
        facts.lanes[0][3, 0] = fact
        facts.ledger[0].append(Batched(policy=0, batch=3, groups=[]))
        facts.steps[0].append(step(3, 3))
        facts.checkpoints[0] = [CheckpointFact(lineage=0, batch=3, version=3, place="c")]

    return apply


def _checkpoint(lineage: int, batch: int) -> Callable[[Facts], None]:
    def apply(facts: Facts) -> None:
        facts.checkpoints[0] = [CheckpointFact(lineage=lineage, batch=batch, version=batch, place="c")]

    return apply


def _prompt_twice(facts: Facts) -> None:
    facts.prompts.append((5, facts.prompts[-1][1]))


def _admitted_twice(facts: Facts) -> None:
    facts.admissions.append(admission(5, offset=4))
    facts.ledger[0] += [opened(5), closed(5)]


def _skipped(offset: int, times: int = 1) -> Callable[[Facts], None]:
    record = Skipped(
        policy=0, stream="main", prompt_id="p", epoch=0, position=offset, operator="greso", reason="probably_easy",
        sources=[Source(topic="prompts", partition=0, offset=offset)],
    )  # fmt: skip
    return lambda facts: facts.ledger[0].extend([record] * times)


def _gap_in_groups(facts: Facts) -> None:
    facts.admissions.append(admission(7))
    facts.ledger[0] += [opened(7), closed(7)]


ENDED = "every admitted group ended exactly once"
ONCE = "every fresh item was trained once in the final lineage"
LOST = "no batched group was lost"
LANES = "lanes hold what their manifests say"
AGREE = "admissions and opened credits agree"


@pytest.mark.parametrize(
    ("breakage", "name", "words"),
    [
        (_insert(3, opened(0)), ENDED, "opened twice"),
        (_insert(0, closed(77)), ENDED, "never opened"),
        (_insert(5, Kept(policy=0, group=0)), ENDED, "kept twice"),
        (_drop(Closed), ENDED, "never ended"),
        (_drop(Kept, 0), ENDED, "was not kept"),
        (_insert(6, closed(0, "stale")), ENDED, "after it ended"),
        (_insert(13, Batched(policy=0, batch=3, groups=[0])), ENDED, "in batch 1 and in batch 3"),
        (_insert(0, opened(8)), AGREE, "without an Admission"),
        (_drop(Opened, 2), AGREE, "admitted and not opened"),
        (_gap_in_groups, AGREE, "gaps"),
        (_insert(3, Opened(policy=0, group=8, stream="m", prompt_id="p", min_version=0, cap=3)),
         "admission stayed within its caps", "credit 4 under a cap of 3"),
        (_prompt_twice, "the source wrote every row once", "position 4"),
        (_admitted_twice, "no prompt was admitted twice or lost", "2 times"),
        (_skipped(4), "no prompt was admitted twice or lost", "prompts[0]@4 was admitted and skipped"),
        (_skipped(5, 2), "no prompt was admitted twice or lost", "prompts[0]@5 was skipped 2 times"),
        (_second_manifest, ONCE, "2 manifests"),
        (_group_in_two_batches, ONCE, "trained fresh 2 times"),
        (_group_in_two_batches, LOST, "only one of ledger and manifest"),
        (_steps(step(1, 1), step(1, 2), step(2, 3)), ONCE, "a step twice"),
        (_steps(step(2, 2)), ONCE, "trained after batch 0"),
        (_steps(step(1, 1)), LOST, "neither trained nor closed"),
        (_steps(step(1, 1), step(2, 2, lineage=1)), ONCE, "of lineage 1"),
        (_steps(step(1, 2), step(2, 2)), "versions only grow", "version 2 comes after 2"),
        (_item_missing, LANES, "holds 3 items"),
        (_item_changed, LANES, "another digest"),
        (_items_swapped, LANES, "not in order"),
        (_lane_without_manifest, LANES, "no manifest"),
        (_too_old, "staleness is at most 0", "1 versions old"),
        (_older_token, "staleness is at most 1", "its tokens -5"),
        (_replay(2), "every replayed use has one manifest entry", "use 2 where use 1 follows"),
        (_checkpoint(1, 2), "checkpoints lie on the final lineage", "lineage 1"),
        (_checkpoint(0, 1), "checkpoints lie on the final lineage", "its newest checkpoint is of batch 1"),
    ],
)  # fmt: skip
def test_a_breach_is_seen(breakage: Callable[[Facts], None], name: str, words: str) -> None:
    facts = whole_run()
    breakage(facts)
    found = broken(facts)
    assert name in found, f"only {list(found)} failed"
    assert any(words in breach for breach in found[name].breaches), found[name].breaches


def test_a_prompt_that_is_neither_admitted_nor_skipped_is_lost() -> None:
    facts = whole_run()
    facts.prompts.append((5, prompt(5)))
    facts.ledger[0].append(End(reason="data"))
    (lost,) = broken(facts).values()
    assert lost.breaches == ("prompts[0]@5 was never admitted",)
    _skipped(5)(facts)
    assert broken(facts) == {}
    assert "1 skipped by name" in [proof.note for proof in prove(facts)]


def test_undecodable_records_are_a_breach() -> None:
    facts = whole_run()
    facts.undecodable.append("ledger[0]@3: broken")
    assert "records can be read" in broken(facts)


def test_what_strangers_wrote_is_counted_and_is_no_breach() -> None:
    facts = whole_run()
    facts.strangers.append("ledger[0]@3: first byte is 103")
    assert broken(facts) == {}
    assert "1 that this run did not write" in next(p for p in prove(facts) if p.name == "records can be read").note


def test_the_first_ending_record_counts_and_later_ones_are_only_counted() -> None:
    facts = whole_run()
    facts.ledger[0] += [closed(0, "end"), closed(2, "stale")]
    assert broken(facts) == {}
    ended = next(p for p in prove(facts) if p.name == ENDED)
    assert "2 later ending records ignored" in ended.note and ended.count == 5


def test_a_run_that_goes_on_may_have_open_groups() -> None:
    facts = whole_run()
    facts.finished = False
    facts.admissions.append(admission(5))
    facts.ledger[0].append(opened(5))
    assert broken(facts) == {}


def test_a_replayed_use_that_follows_is_counted() -> None:
    facts = whole_run()
    _replay(1)(facts)
    assert broken(facts) == {}
    assert next(p for p in prove(facts) if "replayed" in p.name).count == 2


def test_a_rollback_cuts_the_lineage_and_its_batches_are_trained_again() -> None:
    facts = whole_run()
    back = Rollback(policy=0, lineage=1, base_lineage=0, base_batch=1, base_version=1)
    again = Resumed(policy=0, lineage=1, batch=1, version=3)
    facts.steps[0] += [back, again, step(2, 4, lineage=1)]
    facts.checkpoints[0].append(CheckpointFact(lineage=1, batch=2, version=4, place="c"))
    assert broken(facts) == {}
    once = next(p for p in prove(facts) if p.name == ONCE)
    assert once.count == 8 and "1 steps lie before a rollback" in once.note


def test_a_resumed_stands_for_the_step_of_its_base_when_a_trainer_died_before_writing_it() -> None:
    facts = whole_run()
    back = Rollback(policy=0, lineage=1, base_lineage=0, base_batch=2, base_version=2)
    facts.steps[0] = [step(1, 1), back, Resumed(policy=0, lineage=1, batch=2, version=3)]
    facts.checkpoints[0] = [CheckpointFact(lineage=0, batch=2, version=2, place="c")]
    assert broken(facts) == {}
    facts.steps[0] = [back, Resumed(policy=0, lineage=1, batch=2, version=3)]
    assert "batch 2 is trained after batch 0" in broken(facts)[ONCE].breaches[0]


@pytest.mark.parametrize("lineage", [0, 2])
def test_a_resumed_of_another_lineage_than_its_rollbacks_is_seen(lineage: int) -> None:
    facts = whole_run()
    back = Rollback(policy=0, lineage=1, base_lineage=0, base_batch=2, base_version=2)
    facts.steps[0] = [step(1, 1), back, Resumed(policy=0, lineage=lineage, batch=2, version=3)]
    assert f"version 3 is of lineage {lineage}, not 1" in broken(facts)[ONCE].breaches[0]


def test_a_composed_batch_that_the_end_closed_is_not_lost() -> None:
    facts = whole_run()
    facts.steps[0].pop()
    facts.ledger[0] = [r for r in facts.ledger[0] if not (isinstance(r, Trained) and r.batch == 2)]
    facts.ledger[0] += [closed(3, "end"), closed(4, "end")]
    facts.checkpoints[0] = [CheckpointFact(lineage=0, batch=1, version=1, place="c")]
    assert broken(facts) == {}


def test_an_items_oldest_token_is_taken_from_its_trained_tokens() -> None:
    sequence = Sequence(
        policy=0, role="policy", prompt_length=1, end_reason="stop", oldest_version=7, newest_version=9,
        tokens=np.array([1, 2, 3], np.int32), logprobs=np.zeros(3, np.float32), mask=np.array([0, 1, 1], np.uint8),
        versions=np.array([-1, 9, 7], np.int32),
    )  # fmt: skip
    item = Item(
        policy=0, batch=1, lane=0, index=3, use=0, group=5, replica=1, stream="m", prompt_id="p", raw_reward=1.0,
        shaped_reward=1.0, group_mean=0.5, group_std=0.5, group_count=2, length=2, oldest_version=7, newest_version=9,
        end_reason="stop", sequences=[sequence],
    )  # fmt: skip
    assert item_fact(item).oldest_token == 7
    assert item_fact(replace(item, sequences=[])).oldest_token == -1
