"""Programs and generated cases: every cell of the reward table with a real reward that runs them, and faults."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from role_play import CUT, NOTHING, TOO_LONG, Player, earned, task_of, workflow

from headrace.pipeline.rewards.expression import Expression, ExpressionOptions
from headrace.pipeline.rewards.reward import Completion, call_reward
from headrace.pipeline.workflows.solver_testgen import Case, cases_of
from headrace.pipeline.workflows.workflow import EpisodeFailed
from headrace.schemas.checks import check_record
from headrace.schemas.parts import Reward
from headrace.schemas.records import Prompt, Record, Task, Trajectory

OPTIONS: dict[str, Any] = {
    "solver": {"prompt": "solve {question}"},
    "tester": {"system": "", "prompt": "test {question} {attempt} {count}"},
    "retry": {"prompt": "retry {question} {attempt} {feedback}"},
    "shows": "text",
}
HIDDEN = json.dumps({"inputs": [[0], [2], [5]], "outputs": [1, 5, 11]})
REFERENCE = "2*x+1"
RIGHT, WRONG = "1+2*x", "2*x+2"
ALMOST = "x*x*x-7*x*x+12*x+1+2*x"
"""Passes at 0, 3 and 4, and fails the hidden test at 2."""


def cases(*pairs: tuple[int, int]) -> str:
    return json.dumps({"inputs": [[x] for x, _ in pairs], "outputs": [y for _, y in pairs]})


GOOD = cases((3, 7), (4, 9))
BAD = cases((3, 7), (4, 10))
WRONGS_OWN = cases((3, 8), (4, 10))
"""What the wrong program gives."""


@pytest.fixture
def task(examples: dict[str, Record]) -> Task:
    found: Any = examples["Task"]
    return found


class Runs:
    """The stream's reward is ``expression``, by the same way as in a worker."""

    def __init__(self) -> None:
        self.reward = Expression(ExpressionOptions())

    async def score(self, prompt: Prompt, completion: Completion, *, role: str = "") -> list[Reward]:
        parts = call_reward("expression", self.reward, prompt, completion)
        return [Reward(name=name, value=value, role=role) for name, value in parts.items()]


def play(
    task: Task, first: str, tests: str, second: str = RIGHT, *, columns: dict[str, str] | None = None, **options: Any
) -> tuple[Trajectory, Player]:
    solver = Player(0, lambda text: first if text.startswith("solve") else second)
    tester = Player(1, lambda text: tests)
    made = workflow("solver_testgen", {**OPTIONS, **options}, {"code": 0, "tester": 1})
    sessions: Any = {0: solver, 1: tester}
    columns = {"solution": REFERENCE} if columns is None else columns
    asked = task_of(task, 0, 1, answer=HIDDEN, columns=columns)
    trajectory = asyncio.run(made.run(asked, sessions, Runs()))
    check_record(trajectory)
    return trajectory, solver


TABLE = [
    # program, cases, retry; tried again, what solver and tester earn, outcome; what the tester earns by "finals"
    (RIGHT, GOOD, "", False, 1, 1, 1, 2),
    (WRONG, GOOD, RIGHT, True, 0, 1, 1, 2),
    (WRONG, GOOD, WRONG, True, 0, 1, 0, 1),
    (ALMOST, GOOD, "", False, 0, 0.5, 0, 1),
    (WRONG, BAD, RIGHT, True, 0, 0, 1, 1),
    (WRONG, BAD, WRONG, True, 0, 0, 0, 0),
    (RIGHT, BAD, "", False, 1, 0, 1, 1),
    (WRONG, WRONGS_OWN, "", False, 0, 0, 0, 0),
    (RIGHT, "no cases", "", False, 1, 0, 1, 1),
    (WRONG, cases((3, 7)), "", False, 0, 0, 0, 0),
]


@pytest.mark.parametrize(("first", "tests", "second", "again", "solver", "tester", "outcome", "finals"), TABLE)
def test_every_cell_of_the_reward_table(
    task: Task, first: str, tests: str, second: str, again: bool, solver: float, tester: float, outcome: float,
    finals: float,
) -> None:  # fmt: skip
    trajectory, _ = play(task, first, tests, second)
    wanted = {"solver": solver, "tester": tester, "outcome": outcome} | ({"retry": outcome} if again else {})
    assert earned(trajectory) == wanted
    assert [s.role for s in trajectory.sequences] == ["solver", "tester"] + (["retry"] if again else [])
    assert earned(play(task, first, tests, second, rewards="outcome")[0]) == {"outcome": outcome}
    assert earned(play(task, first, tests, second, rewards="finals")[0])["tester"] == finals


def test_a_case_that_a_right_program_fails_and_the_reference_passes_earns_half(task: Task) -> None:
    """With a reference that is more forgiving than the hidden tests are strict, row 4 of the table."""
    columns = {"solution": json.dumps([REFERENCE, "2*x+1+x*(x-2)*(x-5)"])}
    at_3 = 2 * 3 + 1 + 3 * (3 - 2) * (3 - 5)
    at_4 = 2 * 4 + 1 + 4 * (4 - 2) * (4 - 5)
    trajectory, solver = play(task, RIGHT, cases((3, at_3), (4, at_4)), columns=columns)
    assert earned(trajectory) == {"solver": 1, "tester": 0.5, "outcome": 1} and len(solver.asked) == 1


def test_cases_that_only_the_program_passes_earn_nothing(task: Task) -> None:
    trajectory, _ = play(task, RIGHT, GOOD, columns={"solution": WRONG})
    assert earned(trajectory) == {"solver": 1, "tester": 0, "outcome": 1} and trajectory.metrics["valid"] == 0


def test_the_retry_is_told_which_cases_failed(task: Task) -> None:
    _, solver = play(task, "2*x+1+(x-3)", GOOD)
    assert solver.asked[1].startswith("retry q 2*x+1+(x-3) It did not pass these cases:\n- for [4] it should give 9")
    assert "[3]" not in solver.asked[1]


@pytest.mark.parametrize("silence", [TOO_LONG, NOTHING])
def test_a_tester_that_says_nothing_is_left_out(task: Task, silence: str) -> None:
    trajectory, solver = play(task, WRONG, silence)
    assert earned(trajectory) == {"solver": 0, "outcome": 0} and len(solver.asked) == 1
    assert trajectory.metrics["unread"] == 1


def test_cases_that_are_cut_off_are_none(task: Task) -> None:
    trajectory, _ = play(task, WRONG, f"{CUT}{GOOD[:-3]}")
    assert earned(trajectory) == {"solver": 0, "tester": 0, "outcome": 0} and trajectory.end_reason == "length"


def test_a_retry_that_says_nothing_leaves_the_first_program(task: Task) -> None:
    trajectory, _ = play(task, WRONG, GOOD, TOO_LONG)
    assert earned(trajectory) == {"solver": 0, "tester": 1, "outcome": 0} and trajectory.metrics["retried"] == 0


@pytest.mark.parametrize(
    "tests",
    [
        '{"inputs": [["a"], [null]], "outputs": [{}, []]}',
        '{"inputs": [[NaN], [Infinity]], "outputs": [1, 2]}',
        '{"inputs": [[1, 2, 3, 4], 5], "outputs": [1, 1e999]}',
        '{"inputs": ["\\ud800", [1]], "outputs": ["\\ud800", 2]}',
    ],
)
def test_cases_without_sense_are_passed_by_nothing_and_break_nothing(task: Task, tests: str) -> None:
    trajectory, _ = play(task, WRONG, tests, WRONG)
    assert earned(trajectory) == {"solver": 0, "tester": 0, "retry": 0, "outcome": 0}


@pytest.mark.parametrize("columns", [{}, {"other": "1"}, {"solution": "[]"}, {"solution": "[1]"}])
def test_a_row_without_a_reference_is_named(task: Task, columns: dict[str, str]) -> None:
    with pytest.raises(EpisodeFailed, match="no reference solution in column 'solution'"):
        play(task, RIGHT, GOOD, columns=columns)


def test_cases_may_stand_in_a_column_as_texts_for_standard_input(task: Task) -> None:
    class Reads(Runs):
        seen: ClassVar[list[str]] = []

        async def score(self, prompt: Prompt, completion: Completion, *, role: str = "") -> list[Reward]:
            self.seen.append(prompt.columns["tests"])
            return [Reward(name="code", value=1.0, role=role)]

    made = workflow("solver_testgen", {**OPTIONS, "tests_column": "tests", "case_form": "stdin"}, {"a": 0, "b": 1})
    said = '{"inputs": [["1 2", 3], "x"], "outputs": [4, "y"]}'
    players: Any = {0: Player(0, lambda text: "p"), 1: Player(1, lambda text: said)}
    asked = task_of(task, 0, 1, columns={"solution": "p", "tests": "hidden"})
    asyncio.run(made.run(asked, players, Reads()))
    assert Reads.seen[0] == "hidden"
    assert {json.dumps(json.loads(text)) for text in Reads.seen[1:]} == {
        json.dumps([{"input": "1 2\n3", "output": "4"}]), json.dumps([{"input": "x", "output": "y"}])
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "count", "found"),
    [
        (f"```json\n{GOOD}\n```", 2, 2),
        (f"<analysis>{{}}</analysis>\n```json\n{BAD}\n``` no\n```\n{GOOD}\n```", 2, 2),
        (f"here {GOOD} done", 1, 1),
        ("```json\n{}\n```", 1, 0),
        ('{"inputs": [[1]], "outputs": []}', 1, 0),
        ('{"inputs": 1, "outputs": [1]}', 1, 0),
        ("[1, 2]", 1, 0),
        ("{" * 100_000, 1, 0),
        ('{"inputs": ' + "[" * 9000 + "]" * 9000 + ', "outputs": [1]}', 1, 0),
        ("}{", 1, 0),
    ],
)
def test_cases_are_read_from_the_last_block_or_not_at_all(text: str, count: int, found: int) -> None:
    assert len(cases_of(text, count)) == found


def test_of_more_cases_the_first_count() -> None:
    assert cases_of(cases((1, 2), (3, 4), (5, 6)), 2) == [Case([1], 2), Case([3], 4)]


@given(st.text(max_size=300), st.integers(1, 3))
def test_any_text_has_as_many_cases_as_asked_for_or_none(text: str, count: int) -> None:
    assert len(cases_of(text, count)) in (0, count)
