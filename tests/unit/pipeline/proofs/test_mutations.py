"""Every single change to the record of a whole run that breaks the protocol is seen by some proof; the rest by none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace

import pytest
from run_facts import closed, opened, step, whole_run

from headrace.pipeline.proofs.facts import Facts
from headrace.pipeline.verify import prove
from headrace.schemas.records import Batched, Closed, Kept, Opened, Record, Step, Trained

Change = Callable[[Facts], None]


def breaches(facts: Facts) -> list[str]:
    return [breach for proof in prove(facts) for breach in proof.breaches]


def name_of(record: Record) -> str:
    number = getattr(record, "group", getattr(record, "batch", ""))
    return f"{type(record).__name__} {number}"


def dropped(at: int) -> Change:
    return lambda facts: facts.ledger[0].pop(at) and None


def doubled(at: int) -> Change:
    return lambda facts: facts.ledger[0].insert(at, facts.ledger[0][at])


def moved(at: int, to: int) -> Change:
    return lambda facts: facts.ledger[0].insert(to, facts.ledger[0].pop(at))


LEDGER = whole_run().ledger[0]
COVERED = [n for n, r in enumerate(LEDGER) if isinstance(r, Trained) and r.batch == 1]
"""A Trained is covered by that of any later batch (protocol 3)."""
NEEDED = [pytest.param(n, id=name_of(r)) for n, r in enumerate(LEDGER) if n not in COVERED]


@pytest.mark.parametrize("at", NEEDED)
def test_a_ledger_without_one_of_its_records_is_broken(at: int) -> None:
    facts = whole_run()
    dropped(at)(facts)
    assert breaches(facts)


@pytest.mark.parametrize("at", range(len(LEDGER)), ids=[name_of(r) for r in LEDGER])
def test_a_ledger_with_one_of_its_records_twice_is_broken_unless_a_second_ending(at: int) -> None:
    facts = whole_run()
    doubled(at)(facts)
    harmless = isinstance(LEDGER[at], Closed | Trained)
    assert bool(breaches(facts)) != harmless


@pytest.mark.parametrize("at", NEEDED)
def test_a_record_before_what_it_follows_from_is_broken(at: int) -> None:
    record = LEDGER[at]
    if isinstance(record, Opened):
        facts = whole_run()
        ends = max(n for n, other in enumerate(LEDGER) if record.group in _groups(other))
        moved(at, ends)(facts)
        assert breaches(facts), "what follows comes before the opening"
        return
    facts = whole_run()
    moved(at, 0)(facts)
    assert breaches(facts)


def _groups(record: Record) -> list[int]:
    if isinstance(record, Batched):
        return list(record.groups)
    return [record.group] if isinstance(record, Opened | Kept | Closed) else []


def _with_step(at: int, **over: float) -> Change:
    def apply(facts: Facts) -> None:
        record = facts.steps[0][at]
        assert isinstance(record, Step)
        facts.steps[0][at] = replace(record, **over)  # type: ignore[arg-type]

    return apply


def _with_manifest(at: int, **over: object) -> Change:
    def apply(facts: Facts) -> None:
        facts.manifests[0][at] = replace(facts.manifests[0][at], **over)  # type: ignore[arg-type]

    return apply


def _with_member(batch: int, at: int, **over: int) -> Change:
    def apply(facts: Facts) -> None:
        record = facts.manifests[0][batch]
        members = list(record.members)
        members[at] = replace(members[at], **over)
        facts.manifests[0][batch] = replace(record, members=members)

    return apply


def _with_lane(batch: int, **over: object) -> Change:
    def apply(facts: Facts) -> None:
        record = facts.manifests[0][batch]
        facts.manifests[0][batch] = replace(record, lanes=[replace(record.lanes[0], **over)])  # type: ignore[arg-type]

    return apply


def _with_item(batch: int, at: int, **over: int) -> Change:
    def apply(facts: Facts) -> None:
        items = facts.lanes[0][batch, 0].items
        items[at] = replace(items[at], **over)

    return apply


def _with_checkpoint(**over: object) -> Change:
    def apply(facts: Facts) -> None:
        facts.checkpoints[0][0] = replace(facts.checkpoints[0][0], **over)  # type: ignore[arg-type]

    return apply


def _with_prompt(at: int, **over: object) -> Change:
    def apply(facts: Facts) -> None:
        offset, prompt = facts.prompts[at]
        facts.prompts[at] = (offset, replace(prompt, **over))  # type: ignore[arg-type]

    return apply


def _with_admission(at: int, **over: object) -> Change:
    def apply(facts: Facts) -> None:
        facts.admissions[at] = replace(facts.admissions[at], **over)  # type: ignore[arg-type]

    return apply


def facts_changed() -> Iterator[tuple[str, Change]]:
    for at in (0, 1):
        yield f"step {at} of another batch", _with_step(at, batch=at + 5)
        yield f"step {at} of another lineage", _with_step(at, lineage=1)
        yield f"step {at} dropped", lambda facts, at=at: facts.steps[0].pop(at) and None  # type: ignore[misc]
        yield f"step {at} twice", lambda facts, at=at: facts.steps[0].append(facts.steps[0][at])  # type: ignore[misc]
        yield f"manifest {at} dropped", lambda facts, at=at: facts.manifests[0].pop(at) and None  # type: ignore[misc]
        yield f"manifest {at} of another batch", _with_manifest(at, batch=at + 5)
        yield f"manifest {at} counts other groups", _with_manifest(at, fresh_groups=3)
        yield f"manifest {at} starts later", _with_manifest(at, start_version=9)
        yield f"lane of manifest {at} counts more", _with_lane(at, count=5)
        yield f"lane of manifest {at} has other tokens", _with_lane(at, tokens=1)
        yield f"lane of manifest {at} has another digest", _with_lane(at, digest="0")
        yield f"lane of batch {at + 1} is missing", lambda facts, at=at: facts.lanes[0].pop((at + 1, 0)) and None  # type: ignore[misc]
        for member in range(4):
            yield f"member {member} of manifest {at} is of another group", _with_member(at, member, group=9)
            yield f"member {member} of manifest {at} is another replica", _with_member(at, member, replica=7)
            yield f"member {member} of manifest {at} is used before", _with_member(at, member, use=1)
            yield f"member {member} of manifest {at} is in another lane", _with_member(at, member, lane=1)
            yield f"item {member} of batch {at + 1} is of another group", _with_item(at + 1, member, group=9)
            yield f"item {member} of batch {at + 1} is another replica", _with_item(at + 1, member, replica=7)
            yield f"item {member} of batch {at + 1} lies elsewhere", _with_item(at + 1, member, index=9)
            yield f"item {member} of batch {at + 1} is older", _with_item(at + 1, member, oldest_version=-7)
            yield f"a token of item {member} of batch {at + 1} is older", _with_item(at + 1, member, oldest_token=-7)
    yield "second step has the version of the first", _with_step(1, version=1)
    yield "checkpoint of a later batch", _with_checkpoint(batch=3)
    yield "checkpoint of an earlier batch", _with_checkpoint(batch=1)
    yield "checkpoint of a later lineage", _with_checkpoint(lineage=1)
    for at in range(5):
        yield f"prompt {at} at another position", _with_prompt(at, position=at + 1)
        yield f"admission {at} of another group", _with_admission(at, group=at + 7)
        yield f"admission {at} for no policy", _with_admission(at, policies=[])
        yield f"admission {at} dropped", lambda facts, at=at: facts.admissions.pop(at) and None  # type: ignore[misc]
        yield f"admission {at} twice", lambda facts, at=at: facts.admissions.append(facts.admissions[at])  # type: ignore[misc]


CHANGES = dict(facts_changed())


@pytest.mark.parametrize("name", CHANGES)
def test_one_changed_fact_is_seen(name: str) -> None:
    facts = whole_run()
    CHANGES[name](facts)
    assert breaches(facts), "no proof saw it"


def two_policies() -> Facts:
    """The whole run by each of two policies; prompts and group ids are shared."""
    facts = whole_run()
    facts.policies, facts.bounds = ["a", "b"], [1, 1]
    facts.admissions = [
        replace(a, policies=[a.policies[0], replace(a.policies[0], policy=1)]) for a in facts.admissions
    ]
    for table in (facts.ledger, facts.manifests, facts.steps, facts.lanes, facts.checkpoints):
        table[1] = copy(table[0])  # type: ignore[index]
    return facts


def test_policies_are_followed_apart_and_breaches_name_theirs() -> None:
    facts = two_policies()
    assert breaches(facts) == []
    facts.ledger[1] = [r for r in facts.ledger[1] if not isinstance(r, Trained)]
    facts.steps[1].append(step(2, 3))
    found = breaches(facts)
    assert found and all(text.startswith("b: ") for text in found)


def test_a_group_that_only_one_policy_had_room_for_is_whole() -> None:
    facts = two_policies()
    facts.ledger[1] = [r for r in facts.ledger[1] if 2 not in _groups(r)]
    assert any("b: group 2 was admitted and not opened" in text for text in breaches(facts))
    facts.admissions[2] = replace(facts.admissions[2], policies=facts.admissions[2].policies[:1])
    assert breaches(facts) == []


@pytest.mark.parametrize("reason", ["filtered", "failed", "stale", "evicted", "end"])
def test_every_reason_ends_a_credit_and_is_counted(reason: str) -> None:
    facts = whole_run()
    facts.ledger[0] = [closed(2, reason) if isinstance(r, Closed) else r for r in facts.ledger[0]]
    ended = next(p for p in prove(facts) if p.name == "every admitted group ended exactly once")
    assert not breaches(facts) and f"{reason} 1" in ended.note and "trained 4" in ended.note


def test_the_cap_in_force_is_that_of_each_opening() -> None:
    for cap in range(1, 6):
        facts = whole_run()
        facts.ledger[0] = [opened(r.group, cap) if isinstance(r, Opened) else r for r in facts.ledger[0]]
        assert bool(breaches(facts)) == (cap < 4), "four were open at once"
