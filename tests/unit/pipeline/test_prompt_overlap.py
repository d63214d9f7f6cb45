"""Held-out prompts that were trained on are found by what they say, and told with what they earned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stage_feed import make_prompt

from headrace.pipeline.evaluation import EVALUATION_STREAM
from headrace.pipeline.prompt_overlap import PromptOverlap
from headrace.schemas.parts import Message
from headrace.schemas.records import EvalResult, Prompt


def prompt(stream: str, name: str, text: str = "", *turns: str) -> Prompt:
    messages = [Message(role="user", content=turn) for turn in turns]
    return replace(make_prompt(0, stream), prompt_id=name, prompt=text, messages=messages)


def held_out(name: str, text: str = "", *turns: str) -> Prompt:
    return prompt(EVALUATION_STREAM, name, text, *turns)


def result(name: str, reward: float) -> EvalResult:
    return EvalResult(
        policy=0, suite="heldout", prompt_id=name, replica=0, version=4, oldest_version=4, newest_version=4,
        reward=reward, tokens=3, end_reason="stop", finished_ms=1,
    )  # fmt: skip


def overlap(*prompts: Prompt) -> PromptOverlap:
    found = PromptOverlap()
    for one in prompts:
        found.fold(one)
    return found


def test_shared_prompts_are_found_by_what_they_say_once_each() -> None:
    found = overlap(
        held_out("a", "What is  two?"), held_out("b", "Else"), held_out("c", "", "Hi", "there"), held_out("d", "Hi"),
        prompt("main", "x", "what is TWO?\n"), prompt("other", "y", "what is two?"), prompt("main", "b", "another"),
        prompt("main", "z", "", "hi", "there"),
    ).figures([result("a", 1.0), result("b", 0.0), result("c", 0.5), result("d", 0.25)])  # fmt: skip
    assert found is not None
    assert (found.held_out, found.shared, found.named) == (4, 2, ["a", "c"])
    assert (found.accuracy_shared, found.accuracy_others) == (0.75, 0.125)
    assert found.summary() == (
        "2 of 4 held-out prompts are training prompts too (a, c): accuracy 0.750 on them, 0.125 on the others"
    )


@pytest.mark.parametrize("turns", [("hi", "there you"), ("hi there",), ("there", "hi")])
def test_other_turns_are_another_prompt(turns: tuple[str, ...]) -> None:
    found = overlap(held_out("c", "", "hi", "there"), prompt("main", "z", "", *turns)).figures([])
    assert found is not None and (found.shared, found.accuracy_others, found.summary()) == (0, None, "")


def test_without_held_out_prompts_there_is_nothing_to_tell() -> None:
    assert overlap(prompt("main", "x", "a")).figures([]) is None
    many = overlap(*[held_out(f"h{n}", str(n)) for n in range(9)], *[prompt("m", "x", str(n)) for n in range(9)])
    told = many.figures([])
    assert told is not None and told.summary() == (
        "9 of 9 held-out prompts are training prompts too (h0, h1, h2, h3, h4 ...)"
    )
