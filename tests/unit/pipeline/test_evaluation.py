"""Which versions are evaluated, once each, and in what place of the queue."""

from __future__ import annotations

from stage_feed import make_prompt

from headrace.pipeline.evaluation import Evaluation
from headrace.pipeline.runtime.store import MemoryStore, StoreView
from headrace.schemas.config import EvalConfig


def made(**more: object) -> tuple[Evaluation, StoreView]:
    store = StoreView(MemoryStore(), b"s")
    evaluation = Evaluation(EvalConfig.model_validate({"dataset": "held", "every": 3, "samples": 2, **more}), 2)
    for number in range(2):
        evaluation.add(make_prompt(number, "@eval"), store)
    return evaluation, store


def test_nothing_is_issued_before_the_held_out_set_is_complete() -> None:
    evaluation, store = made()
    assert evaluation.issue(0, 0, 0, store) == []
    assert evaluation.close(store)
    assert not evaluation.close(store)
    assert len(evaluation.issue(0, 0, 0, store)) == 4


def test_each_version_is_issued_once_per_policy_with_numbers_of_its_own() -> None:
    evaluation, store = made()
    evaluation.close(store)
    tasks = evaluation.issue(0, 0, 9, store) + evaluation.issue(1, 0, 9, store) + evaluation.issue(0, 3, 9, store)
    assert evaluation.issue(0, 3, 9, store) == evaluation.issue(0, 2, 9, store) == []
    assert [(t.group, t.replica) for t in tasks] == [(n, s) for n in range(6) for s in range(2)]
    assert [t.detail["version"] for t in tasks] == [0] * 8 + [3] * 4
    first, second = tasks[0].order, tasks[4].order
    assert first < second < 0, "of what goes before all groups the earlier issue goes first"
    assert [t.order for t in tasks] == [first] * 4 + [second] * 4 + [9] * 4
    assert [evaluation.due(v) for v in range(7)] == [True, False, False, True, False, False, True]


def test_priority_before_goes_before_everything_and_no_interval_means_start_and_end_only() -> None:
    evaluation, store = made(priority="before", every=0)
    evaluation.close(store)
    assert not evaluation.due(0) and not evaluation.due(3)
    assert all(t.order < 0 for t in evaluation.issue(0, 7, 99, store))


def test_everything_comes_back_from_the_store() -> None:
    evaluation, store = made()
    evaluation.close(store)
    evaluation.issue(0, 3, 0, store)
    again = Evaluation(evaluation.config, 2)
    again.load(store)
    assert [p.prompt_id for p in again.prompts] == ["@eval-0", "@eval-1"]
    assert again.issue(0, 3, 0, store) == []
    assert again.issue(1, 3, 0, store)[0].group == 2


def test_no_held_out_prompts_no_tasks() -> None:
    evaluation = Evaluation(EvalConfig(), 1)
    store = StoreView(MemoryStore(), b"s")
    assert not evaluation.close(store)
    assert evaluation.issue(0, 0, 0, store) == []
