"""Tasks say what their group, their evaluation or their score needs, and nothing of anybody else's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_feed import make_config, make_prompt

from headrace.pipeline.credits import ROLLING, OpenGroup
from headrace.pipeline.dispatch import TaskWriter
from headrace.pipeline.evaluation import EVALUATION_STREAM, Evaluation
from headrace.pipeline.leases import Work, Worker
from headrace.pipeline.runtime.store import MemoryStore, StoreView
from headrace.schemas.checks import check_record
from headrace.schemas.config import EvalConfig
from headrace.schemas.parts import PolicyBound, Source

TWO = {"a": {"model": "none"}, "b": {"model": "none"}}
WORKER = Worker(
    name="w0", incarnation=7, role="any", capacity=4, held=0, read=0, issued=3, policies={0: 4}, seen_ms=0
)  # fmt: skip


def group(**over: Any) -> OpenGroup:
    fields: dict[str, Any] = {
        "group": 5, "stream": "main", "prompt": make_prompt(9), "offset": 31, "states": {0: ROLLING},
        "bounds": {0: 4, 1: 2}, "replicas": 2, "retry": 0,
    }  # fmt: skip
    return OpenGroup(**{**fields, **over})


def work(kind: str = "train", **over: Any) -> Work:
    fields: dict[str, Any] = {
        "kind": kind, "group": 5, "replica": 1, "order": 5, "attempt": 2, "sequence": 3, "deadline_ms": 99,
        "partial": 17,
    }  # fmt: skip
    return Work(**{**fields, **over})


def test_a_training_task_carries_the_groups_prompt_bounds_and_place() -> None:
    config = make_config(
        policies=TWO, rollout={"temperature": 0.5, "top_p": 0.75, "top_k": 8, "max_new_tokens": 33},
        evaluation={"temperature": 0.25},
    )  # fmt: skip
    made = TaskWriter(config).task(work(), WORKER, group(), [], now_ms=50)
    check_record(made)
    assert (made.kind, made.group, made.replica, made.attempt, made.partial) == ("train", 5, 1, 2, 17)
    assert (made.worker, made.incarnation, made.sequence) == ("w0", 7, 3)
    assert (made.issued_ms, made.deadline_ms) == (50, 99)
    assert made.policies == [PolicyBound(policy=0, min_version=4), PolicyBound(policy=1, min_version=2)]
    assert made.sources == [Source(topic="prompts", partition=0, offset=31)] and made.members == []
    assert made.prompt == make_prompt(9) and made.workflow == "single_turn"
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.5, 0.75, 8, 33)


def test_a_score_task_names_the_members_it_compares() -> None:
    members = [("trajectories", 1, 40), ("trajectories", 1, 44)]
    made = TaskWriter(make_config()).task(work("score", detail={"members": members}), WORKER, group(), [], 50)
    assert made.members == [Source(topic=t, partition=p, offset=o) for t, p, o in members]
    assert made.kind == "score" and made.prompt == make_prompt(9)


def test_work_that_outlived_its_group_is_a_fault_of_the_program() -> None:
    with pytest.raises(AssertionError, match="train work of group 5 outlived its group"):
        TaskWriter(make_config()).task(work(), WORKER, None, [], 50)


@pytest.mark.parametrize(("role", "pinned"), [("any", False), ("train", False), ("eval", True)])
def test_an_evaluation_asks_for_its_version_and_pins_it_on_workers_of_that_role(role: str, pinned: bool) -> None:
    config = make_config(evaluation={"temperature": 0.25}, rollout={"top_k": 8, "top_p": 0.5, "max_new_tokens": 9})
    held_out = [make_prompt(n, EVALUATION_STREAM) for n in range(3)]
    asked = work("eval", detail={"policy": 0, "version": 6, "prompt": 2})
    made = TaskWriter(config).task(asked, replace(WORKER, role=role), None, held_out, 50)
    check_record(made)
    assert made.policies == [PolicyBound(policy=0, min_version=6, pinned=pinned)]
    assert (made.stream, made.prompt, made.sources) == (EVALUATION_STREAM, held_out[2], [])
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.25, 1.0, 9)
    assert sampling.top_k <= 0, "evaluation samples from the whole distribution unless told otherwise"
    own = make_config(evaluation={"temperature": 0.0, "top_p": 0.5, "top_k": 3, "max_new_tokens": 5})
    sampling = TaskWriter(own).task(asked, WORKER, None, held_out, 50).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.0, 0.5, 3, 5)


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.integers(0, 5), samples=st.integers(1, 3), every=st.integers(0, 3),
    versions=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 8)), max_size=12), reload=st.integers(0, 12),
    priority=st.sampled_from(["before", "after"]),
)  # fmt: skip
def test_a_version_is_evaluated_once_by_every_prompt_and_sample(
    prompts: int, samples: int, every: int, versions: list[tuple[int, int]], reload: int, priority: str
) -> None:
    store = StoreView(MemoryStore(), b"s")
    config = EvalConfig.model_validate({"samples": samples, "every": every, "priority": priority})
    evaluation = Evaluation(config, 2)
    for number in range(prompts):
        evaluation.add(make_prompt(number, EVALUATION_STREAM), store)
    assert evaluation.issue(0, 0, 0, store) == [], "nothing before the held-out prompts are complete"
    assert evaluation.close(store) == (prompts > 0)
    assert not evaluation.close(store), "that is news once"
    last = {0: -1, 1: -1}
    seen: set[tuple[str, int, int]] = set()
    for at, (policy, version) in enumerate(versions):
        if at == reload:
            evaluation = Evaluation(config, 2)
            evaluation.load(store)
            assert len(evaluation.prompts) == prompts and evaluation.complete
        made = evaluation.issue(policy, version, 40, store)
        assert evaluation.due(version) == (every > 0 and version % every == 0)
        assert len(made) == (prompts * samples if version > last[policy] else 0)
        last[policy] = max(last[policy], version) if prompts else -1
        assert {w.key for w in made}.isdisjoint(seen), "numbers are given once"
        seen |= {w.key for w in made}
        pairs = {(w.detail["prompt"], w.replica) for w in made}
        assert not made or pairs == {(p, s) for p in range(prompts) for s in range(samples)}
        assert all(w.detail["policy"] == policy and w.detail["version"] == version for w in made)
        assert all(w.order < 0 if version == 0 or priority == "before" else w.order == 40 for w in made)


def test_members_of_a_team_are_evaluated_with_the_others_as_they_are_loaded() -> None:
    config = make_config(policies=TWO, workflow="solver_verifier")
    writer = TaskWriter(config)
    asked = work("eval", detail={"policy": 1, "version": 6, "prompt": 0})
    assert writer.evaluation_bounds(asked) == {1: 6, 0: 0}
    made = writer.task(asked, replace(WORKER, role="eval"), None, [make_prompt(0, EVALUATION_STREAM)], now_ms=1)
    assert made.policies == [
        PolicyBound(policy=1, min_version=6, pinned=True), PolicyBound(policy=0, min_version=0)
    ] and made.workflow == "solver_verifier"  # fmt: skip
    alone = TaskWriter(make_config(policies=TWO))
    assert alone.evaluation_bounds(asked) == {1: 6}
