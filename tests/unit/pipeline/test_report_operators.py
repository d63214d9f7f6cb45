"""A report says which operators a run had, from which package, and what each has dropped."""

from __future__ import annotations

from stage_feed import make_config

from headrace.pipeline.report_operators import operators_in_words
from headrace.pipeline.tally import Tally
from headrace.schemas.records import Closed, Opened, Skipped


def test_operators_in_words() -> None:
    config = make_config(
        policies={"a": {"model": "none"}, "b": {"model": "none"}},
        operators=[
            {"type": "greso"},
            {"type": "length", "max_tokens": 9, "policy": "a"},
            {"type": "length", "max_tokens": 7, "policy": "b", "stream": "main"},
            {"type": "dynamic_sampling"},
            {"type": "gone_since"},
            {"type": "headrace.pipeline.operators.truncated:Truncated"},
        ],
    )
    tally = Tally()
    for policy, group in ((0, 1), (1, 1), (0, 2)):
        tally.fold(Opened(policy=policy, group=group, stream="main", prompt_id="p", min_version=0, cap=9))
        tally.fold(
            Closed(
                policy=policy, group=group, reason="filtered", by="assemble", operator="dynamic_sampling", detail="x"
            )
        )
    for position in range(3):
        tally.fold(
            Skipped(
                policy=position % 2, stream="main", prompt_id="p", epoch=0, position=position, operator="greso",
                reason="probably_easy", detail="x",
            )
        )  # fmt: skip
    assert operators_in_words(config, tally) == {
        "greso": "prompt, of headrace, 3 prompts skipped",
        "length": "filter, of headrace, for a",
        "length 2": "filter, of headrace, for main b",
        "dynamic_sampling": "filter, of headrace, 3 groups dropped",
        "gone_since": "not installed here",
        "headrace.pipeline.operators.truncated:Truncated": "filter",
    }


def test_without_operators_nothing_is_said() -> None:
    assert operators_in_words(make_config(), Tally()) == {}
