"""A tally follows credits, rewards, evaluations and staleness as the ledger orders them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_facts import closed, opened, step, whole_run

from headrace.pipeline.progress import figures_of, line_of, waits_for
from headrace.pipeline.tally import Tally
from headrace.schemas.config import PolicyConfig, RunConfig, StreamConfig, TrainerConfig
from headrace.schemas.parts import HeldTask, HostedPolicy
from headrace.schemas.records import (
    Batched,
    Closed,
    Demand,
    EvalResult,
    Kept,
    Opened,
    Record,
    Rollback,
    Skipped,
    Stop,
    Trained,
)

CONFIG = RunConfig(
    policies={"main": PolicyConfig(model="m")}, streams={"main": StreamConfig(dataset="d")},
    trainer=TrainerConfig(max_steps=5),
)  # fmt: skip


def tally_of(*records: Record) -> Tally:
    tally = Tally()
    for record in records:
        tally.fold(record)
    return tally


def whole_tally() -> Tally:
    facts = whole_run()
    return tally_of(*facts.ledger[0], *facts.manifests[0], *facts.steps[0])


def result(version: int, reward: float, prompt: str = "p", error: str = "") -> EvalResult:
    return EvalResult(
        policy=0, suite="heldout", prompt_id=prompt, replica=0, version=version, oldest_version=version,
        newest_version=version, reward=reward, tokens=3, end_reason="stop", finished_ms=1, error=error,
    )  # fmt: skip


def demand(sent_ms: int, held: int = 0) -> Demand:
    return Demand(
        worker="rollout-0", incarnation=1, role="any", capacity=9, next_sequence=0, inbox=0, sent_ms=sent_ms,
        policies=[HostedPolicy(policy=0, version=1)],
        held=[HeldTask(kind="train", group=n, replica=0, attempt=0) for n in range(held)],
    )  # fmt: skip


def skipped(reason: str) -> Skipped:
    return Skipped(
        policy=0, stream="main", prompt_id="p", epoch=0, position=0, operator="greso", reason=reason, detail="why"
    )  # fmt: skip


def shown(tally: Tally) -> str:
    (figures,) = figures_of(CONFIG, tally)
    return line_of(figures, seconds=0, rollouts=0, per_second=0, dead_letters=0)


def test_a_whole_run_leaves_nothing_open() -> None:
    policy = whole_tally().policies[0]
    assert (policy.opened, policy.trained, policy.version) == (5, 4, 2)
    assert not policy.rolling and not policy.kept and not policy.batched
    assert policy.closed == {"filtered": 1}


def test_only_the_first_ending_record_counts() -> None:
    policy = tally_of(opened(1), closed(1), closed(1, "stale"), closed(9)).policies[0]
    assert policy.closed == {"filtered": 1}


def test_staleness_is_counted_over_items_of_trained_batches() -> None:
    assert whole_tally().policies[0].staleness() == {0: 4, 1: 4}


def test_rewards_gather_between_trained_records_and_count_filtered_groups() -> None:
    kept = Kept(policy=0, group=1, raw_mean=0.5)
    filtered = Closed(policy=0, group=2, reason="filtered", by="assemble", operator="dynamic_sampling", raw_mean=1.0)
    tally = tally_of(opened(1), opened(2), kept, filtered, Trained(policy=0, batch=1, version=1, first=True))
    (point,) = tally.policies[0].rewards
    assert (point.version, point.mean, point.groups) == (1, 0.75, 2)
    assert tally.policies[0].closed == {"filtered (dynamic_sampling)": 1}


def test_accuracy_is_a_mean_over_the_samples_of_a_version() -> None:
    tally = tally_of(result(0, 0.0), result(0, 1.0, "q"), result(25, 0.0, error="engine died"), result(25, 1.0))
    assert tally.policies[0].accuracies() == [(0, 0.5, 2), (25, 1.0, 1)]


def test_of_several_attempts_at_one_sample_the_first_result_counts() -> None:
    again = replace(result(0, 1.0), replica=1)
    tally = tally_of(result(0, 0.0), result(0, 1.0), again, result(1, 1.0), result(0, 1.0, "q"))
    assert tally.policies[0].accuracies() == [(0, pytest.approx(2 / 3), 3), (1, 1.0, 1)]


def trained(batch: int) -> Trained:
    return Trained(policy=0, batch=batch, version=batch, first=True)


LIFE = [opened(1), Kept(policy=0, group=1, raw_mean=0.5), Batched(policy=0, batch=1, groups=[1]), trained(1)]
"""A credit from its opening to its end."""


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("reason", ["stale", "evicted", "end", "failed"])
def test_a_closing_record_ends_a_credit_at_any_time_of_its_life_and_no_later(at: int, reason: str) -> None:
    policy = tally_of(*LIFE[:at], closed(1, reason), *LIFE[at:]).policies[0]
    assert (policy.trained, dict(policy.closed)) == ((1, {}) if at == 4 else (0, {reason: 1}))
    assert not policy.rolling and not policy.kept and not policy.batched


@settings(max_examples=80, deadline=None)
@given(
    records=st.lists(
        st.tuples(st.sampled_from(["open", "keep", "close", "batch", "train"]), st.integers(0, 4)), max_size=40
    )
)
def test_every_opened_credit_is_somewhere_whatever_the_ledger_says(records: list[tuple[str, int]]) -> None:
    tally, seen = Tally(), set()
    for kind, number in records:
        if kind == "open" and number not in seen:
            seen.add(number)
            tally.fold(opened(number))
        elif kind == "keep":
            tally.fold(Kept(policy=0, group=number))
        elif kind == "close":
            tally.fold(closed(number, "stale"))
        elif kind == "batch":
            tally.fold(Batched(policy=0, batch=number, groups=[number, number + 1]))
        elif kind == "train":
            tally.fold(trained(number))
        policy = tally.policies[0]
        held = len(policy.rolling) + len(policy.kept) + len(policy.batched)
        assert held + policy.trained + policy.closed.total() == policy.opened == len(seen)
        assert all(batch > number for batch in policy.batched.values()) if kind == "train" else True


def test_rollbacks_are_counted_by_time() -> None:
    tally = Tally()
    back = Rollback(policy=0, lineage=1, base_lineage=0, base_batch=1, base_version=1)
    tally.fold(back, 1000)
    assert tally.rollbacks_since(500) == 1 and tally.rollbacks_since(1500) == 0


def test_a_line_shows_what_is_known() -> None:
    tally = whole_tally()
    for record in (result(0, 0.0), result(2, 1.0)):
        tally.fold(record)
    (figures,) = figures_of(CONFIG, tally)
    line = line_of(figures, seconds=12, rollouts=40, per_second=3.3, dead_letters=1)
    assert "main v2/5" in line and "held-out 0.000 (v0)" in line and "staleness 0.50" in line
    assert "drops filtered 1" in line and "1 dead letters" in line


def test_a_line_names_what_drops_every_group_until_one_is_kept() -> None:
    """Rollouts come and go, so that the run does not stand still, and nothing will ever be trained."""
    tally, many = Tally(), 4 * CONFIG.trainer_of("main").batch_groups
    for group in range(many):
        assert "were dropped" not in shown(tally)
        tally.fold(opened(group))
        dropped = {"operator": "length", "detail": "too_long: of 8"}
        tally.fold(Closed(policy=0, group=group, reason="filtered", by="assemble", **dropped))
    assert f"all of the last {many} groups were dropped, most by length: too_long" in shown(tally)
    tally.fold(opened(many))
    tally.fold(Kept(policy=0, group=many))
    assert "were dropped" not in shown(tally)


def test_the_newest_evaluation_counts_once_the_policy_has_stopped() -> None:
    tally = tally_of(result(0, 0.0), result(2, 1.0), Stop(reason="steps", policy=0))
    assert figures_of(CONFIG, tally)[0].accuracy == (2, 1.0)


def test_a_line_before_anything_happened() -> None:
    line = line_of(figures_of(CONFIG, Tally())[0], seconds=0, rollouts=0, per_second=0, dead_letters=0)
    assert "main v0/5" in line and "reward" not in line and "drops" not in line


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "no Demand yet: no rollout worker is alive"),
        ([demand(60_000)], "no Demand for 40 s: no rollout worker is alive"),
        ([demand(99_000)], "nothing of main is open"),
        (
            [demand(99_000), opened(1), closed(1), skipped("solved"), skipped("solved"), skipped("broken")],
            "all of the last 3 prompts were dropped, most by greso: solved",
        ),
        ([demand(99_000), skipped("solved"), opened(1), closed(1)], "nothing of main is open: schedule admits"),
        ([replace(demand(99_000), capacity=0)], "suspended: rollout-0; headrace workers resume --all"),
        ([demand(99_000, held=3), opened(1)], "1 groups of main are open while 1 workers hold 3 tasks"),
        ([demand(99_000), opened(1), Kept(policy=0, group=1)], "1 kept groups of main are not enough"),
        ([demand(99_000), whole_run().manifests[0][0]], "batch 1 of main is composed and has no Step"),
        ([step(1, 1), demand(99_000), Stop(reason="s", policy=0)], "all policies have stopped; still running: source"),
    ],
)  # fmt: skip
def test_a_run_that_stands_still_names_what_is_missing(records: list[Record], words: str) -> None:
    said = waits_for(CONFIG, tally_of(*records), now_ms=100_000, troubled={}, running=["source"])
    assert words in said


def test_a_dying_part_is_named_first() -> None:
    waiting = {"trainer-main": "waiting for the object store: s3://b: refused"}
    said = waits_for(CONFIG, Tally(), now_ms=0, troubled={"trainer-main": 3}, running=[], waiting=waiting)
    assert said == "trainer-main says: waiting for the object store: s3://b: refused"
    said = waits_for(CONFIG, Tally(), now_ms=0, troubled={"trainer-main": 3}, running=[])
    assert "trainer-main (3 deaths)" in said


def test_a_cluster_that_does_not_answer_is_named_before_what_follows_from_it() -> None:
    away = "Kafka at k:9092 has not answered for 31 s"
    waiting = {"trainer-main": "waiting for the object store: s3://b: refused"}
    said = waits_for(CONFIG, Tally(), now_ms=0, troubled={"rollout-0": 2}, running=[], waiting=waiting, broker=away)
    assert said == away
    said = waits_for(CONFIG, Tally(), now_ms=0, troubled={"broker": 2}, running=[], broker=away)
    assert said == "parts keep dying: broker (2 deaths); see their logs"


def test_groups_that_fail_one_after_the_other_are_counted_until_one_is_usable() -> None:
    tally = Tally()
    for group in range(5):
        tally.fold(opened(group), 100 * group)
        tally.fold(Closed(policy=0, group=group, reason="failed", by="assemble", detail=f"why {group}"), 100 * group)
    policy = tally.policies[0]
    assert (policy.failed_since(0), policy.failed_since(300), policy.last_failure) == (5, 2, "why 4")
    tally.fold(opened(5), 500)
    tally.fold(Kept(policy=0, group=5, raw_mean=0.5), 500)
    assert policy.failed_since(0) == 0


def test_the_bias_of_dropping_stands_beside_what_is_trained() -> None:
    tally = Tally()
    for group, reward in ((1, 1.0), (2, 0.25)):
        tally.fold(Opened(policy=0, group=group, stream="main", prompt_id="p", min_version=0, cap=9))
        tally.fold(Kept(policy=0, group=group, raw_mean=reward))
    assert tally.policies[0].stale_bias() == {}
    tally.fold(Batched(policy=0, batch=1, groups=[1]))
    tally.fold(Closed(policy=0, group=2, reason="stale", by="batch", raw_mean=0.25, tokens=90))
    assert tally.policies[0].stale_bias() == {
        "groups": 1, "unfinished": 0, "reward": 0.25, "tokens": 90.0, "reward_trained": 1.0,
    }  # fmt: skip
