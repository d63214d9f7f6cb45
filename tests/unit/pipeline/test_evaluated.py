"""avg@k, pass@k and the best version are what their definitions say, and a failed sample is no sample."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.pipeline.evaluated import Best, EvaluationTally, pass_at_k
from headrace.schemas.config import EvalConfig
from headrace.schemas.records import EvalResult


def result(version: int, prompt: str, replica: int, reward: float, error: str = "", **over: Any) -> EvalResult:
    fields: dict[str, Any] = {
        "policy": 0, "suite": "heldout", "prompt_id": prompt, "replica": replica, "version": version,
        "oldest_version": version, "newest_version": version, "reward": reward, "tokens": 3, "end_reason": "stop",
        "finished_ms": 1, "error": error,
    }  # fmt: skip
    return EvalResult(**{**fields, **over})


def tally_of(*results: EvalResult) -> EvaluationTally:
    tally = EvaluationTally()
    for one in results:
        tally.fold(one)
    return tally


def version(number: int, *rewards: list[float]) -> list[EvalResult]:
    """The samples of a version, a list of rewards for each prompt."""
    return [result(number, f"p{p}", r, reward) for p, row in enumerate(rewards) for r, reward in enumerate(row)]


def settings_of(**over: Any) -> EvalConfig:
    return EvalConfig.model_validate({"dataset": "d", "samples": 4, **over})


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_solved_sample(samples: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    drawn = list(itertools.combinations([True] * solved + [False] * (samples - solved), k))
    assert pass_at_k(samples, solved, k) == pytest.approx(sum(map(any, drawn)) / len(drawn))


def test_metrics_of_a_version() -> None:
    (one,) = tally_of(*version(3, [1, 0, 0, 0], [1, 1, 0, 0.5])).evaluated(settings_of())
    assert (one.version, one.prompts, one.samples, one.failed, one.other) == (3, 2, 8, 0, 0.0)
    assert one.metrics == {
        "avg": pytest.approx(3.5 / 8), "pass@1": pytest.approx((1 / 4 + 2 / 4) / 2),
        "pass@2": pytest.approx((1 / 2 + 5 / 6) / 2), "pass@4": 1.0,
    }  # fmt: skip
    (lower,) = tally_of(*version(3, [1, 0, 0, 0], [1, 1, 0, 0.5])).evaluated(settings_of(solved_at=0.5))
    assert lower.metrics["pass@1"] == pytest.approx((1 / 4 + 3 / 4) / 2)


def test_the_metric_that_the_best_is_chosen_by_is_taken_whatever_the_number_of_samples() -> None:
    tally = tally_of(*version(0, [0.0] * 9 + [1.0]))
    (one,) = tally.evaluated(settings_of(samples=10, best="pass@3"))
    assert sorted(one.metrics) == ["avg", "pass@1", "pass@10", "pass@2", "pass@3", "pass@4", "pass@8"]
    assert one.metrics["pass@3"] == pytest.approx(0.3)


def test_a_failed_sample_is_counted_and_is_no_sample_and_a_usable_attempt_beats_it() -> None:
    tally = tally_of(
        result(0, "a", 0, 0.0, "boom"), result(0, "a", 1, 1.0), result(0, "b", 0, 0.0, "boom"),
        result(0, "b", 0, 1.0), result(0, "b", 0, 0.0), result(0, "b", 1, 1.0),
    )  # fmt: skip
    (one,) = tally.evaluated(settings_of(samples=2))
    assert (one.samples, one.failed, one.metrics["avg"]) == (3, 1, 1.0), "of two usable results the first counts"
    assert one.metrics["pass@2"] == 1.0 and one.whole == {"avg", "pass@1"}, "pass@2 lacks a prompt"
    assert tally.whole(settings_of(samples=2)) == [0]


def test_the_best_version_is_the_first_of_the_highest_among_whole_ones() -> None:
    tally = tally_of(
        *version(0, [0, 0], [0, 0]), *version(5, [1, 1], [0, 0]), *version(9, [1, 0], [1, 0]),
        *version(12, [1, 0], [0, 1]), *version(15, [1, 1], [1]),
    )  # fmt: skip
    by = settings_of(samples=2)
    assert tally.best(by) == Best(5, "avg", 0.5)
    assert tally.best(by.model_copy(update={"best": "pass@2"})) == Best(9, "pass@2", 1.0)
    assert tally.best(by.model_copy(update={"best": ""})) is None
    assert tally.whole(by) == [0, 5, 9, 12], "of the last one a sample is still to come"
    tally.fold(result(15, "p1", 1, 1.0))
    assert tally.best(by) == Best(15, "avg", 1.0)


def test_a_version_that_lacks_a_prompt_is_not_compared() -> None:
    tally = tally_of(*version(0, [1], [0]), result(4, "p0", 0, 1.0), result(4, "p1", 0, 0.0, "boom"))
    assert tally.whole(settings_of(samples=1)) == [0, 4]
    assert tally.best(settings_of(samples=1)) == Best(0, "avg", 0.5)


def test_figures_tell_first_and_last_and_what_other_versions_sampled() -> None:
    tally = tally_of(
        *version(0, [0, 0]), result(8, "p0", 0, 1.0, newest_version=9), result(8, "p0", 1, 1.0),
        result(8, "p0", 2, 0.0, "boom"),
    )  # fmt: skip
    found = tally.figures(settings_of(samples=2))
    assert found is not None
    assert found.metrics == {"avg": [0.0, 1.0], "pass@1": [0.0, 1.0], "pass@2": [0.0, 1.0]}
    assert found.curves["pass@2"] == [(0, 0.0), (8, 1.0)]
    assert (found.samples, found.failed, found.other, found.versions) == (4, 1, 0.25, [0, 8])
    assert found.best == Best(8, "avg", 1.0)
    assert found.summary() == (
        "evaluation: pass@1 0.000 -> 1.000, pass@2 0.000 -> 1.000, best version 8 by avg (1.000), 1 samples failed, "
        "25% of the samples with tokens of later versions"
    )
    assert EvaluationTally().figures(settings_of()) is None


@pytest.mark.parametrize("name", ["pass@5", "pass@0", "mean", "pass@"])
def test_a_metric_that_cannot_be_taken_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"with 4 samples a row there are avg, pass@1, pass@2, pass@3, pass@4"):
        settings_of(best=name)


def test_a_run_without_a_best_version_says_why_unless_none_was_asked_for() -> None:
    results = [*version(0, [1.0, 0.0]), result(0, "p1", 0, 0.0, error="hung"), result(0, "p1", 1, 0.0, error="hung")]
    for best, said in (("pass@2", True), ("", False)):
        figures = tally_of(*results).figures(settings_of(samples=2, best=best))
        assert figures is not None and figures.best is None
        assert ("no best version: none has a result for every sample, and pass@2 for" in figures.summary()) == said
