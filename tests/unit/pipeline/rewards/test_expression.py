"""Formulas are worth 1 when they give every case's value, and nothing that is no formula does anything."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.rewards.expression import Expression, ExpressionOptions, value_of
from headrace.pipeline.rewards.reward import Completion, RewardFailed, call_reward, load_reward
from headrace.schemas.records import Prompt


def prompt(*cases: tuple[Any, Any], answer: str | None = None) -> Prompt:
    if answer is None:
        answer = json.dumps({"inputs": [i for i, _ in cases], "outputs": [o for _, o in cases]})
    return Prompt(prompt_id="p", stream="main", dataset="d", row=0, epoch=0, position=0, answer=answer)


def score(text: str, *cases: tuple[Any, Any], end: str = "stop", **options: Any) -> float:
    return Expression(ExpressionOptions(**options))(prompt(*cases), Completion(text, end))


@pytest.mark.parametrize(
    ("text", "cases", "value"),
    [
        ("3*x+5", [([1], 8), ([2], 11)], 1),
        ("3*x+5", [([1], 8), ([2], 12)], 0),
        (" -(x - y) ** 2 ", [([1, 4], -9)], 1),
        ("x / 2", [(3, 1.5)], 1),
        ("x // 2 % 3", [([11], 2)], 1),
        ("z", [([1, 2, 3], 3)], 1),
        ("1e3", [([], 1000)], 1),
        ("x +", [([1], 1)], 0),
        ("", [([1], 1)], 0),
        ("1 / x", [([0], 0)], 0),
        ("y", [([1], 1)], 0),
        ("x", [([1, 2, 3, 4], 1)], 0),
        ("x", [(["1"], "1")], 0),
        ("x", [([True], True)], 0),
        ("True", [([1], 1)], 0),
        ("x", [([10**30], 10**30)], 0),
    ],
)
def test_a_formula_is_right_or_wrong(text: str, cases: list[tuple[Any, Any]], value: float) -> None:
    assert score(text, *cases) == value


def test_what_is_cut_off_or_too_long_is_wrong() -> None:
    assert score("x", ([1], 1), end="length") == 0
    assert (score("x+0", ([1], 1), longest=3), score("x+0+0", ([1], 1), longest=3)) == (1, 0)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "x.real", "[x]", "x if x else 1", "lambda: 1", "x == 1", "f'{x}'", "9**9**9", "x**99",
        "10**12*10", "(" * 99 + "x" + ")" * 98, "(0-1)**0.5", "1_0", "'a'*3", "x := 1", "~x", "1" * 199, "x\0", "é",
        "0**-1", "2 ** -9999999999",
    ],
)  # fmt: skip
def test_what_is_no_formula_has_no_value(text: str) -> None:
    if text == "1_0":  # a number in Python
        assert value_of(text, [1]) == 10
    else:
        with pytest.raises(ValueError):
            value_of(text, [1])
    assert score(text, ([1], 1)) == 0


@given(st.text(alphabet="x0123456789+-*/%(). ", max_size=40))
def test_any_text_has_a_finite_value_or_none(text: str) -> None:
    with suppress(ValueError):
        assert abs(value_of(text, [3])) <= 10**12
    assert score(text, ([3], 7)) in (0, 1)


@pytest.mark.parametrize("answer", ["", "42", "{}", '{"inputs": [], "outputs": []}', '{"inputs": [1], "outputs": []}'])
def test_a_row_without_cases_fails_by_name(answer: str) -> None:
    with pytest.raises(RewardFailed, match=r"reward expression raised ValueError: the row's answer holds no cases"):
        call_reward("expression", load_reward("expression", {}), prompt(answer=answer), Completion("x", "stop"))
