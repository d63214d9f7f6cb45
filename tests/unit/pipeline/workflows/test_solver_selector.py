"""Two answers and a choice: every cell of the reward table, and a selector that cannot be read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from role_play import CUT, NOTHING, TOO_LONG, Marks, Player, earned, task_of, workflow

from headrace.pipeline.workflows.solver_selector import choice_of
from headrace.schemas.checks import check_record
from headrace.schemas.records import Record, Task, Trajectory

A, B, UNREAD = "<final>A</final>", "<final>B</final>", "A, I think"
OPTIONS: dict[str, Any] = {
    "solver": {"prompt": "solve {question}"},
    "selector": {"system": "", "prompt": "choose {question} {candidate_a} {candidate_b}"},
    "shows": "text",
}


@pytest.fixture
def task(examples: dict[str, Record]) -> Task:
    found: Any = examples["Task"]
    return found


def play(task: Task, a: str, b: str, choice: str, **options: Any) -> tuple[Trajectory, Player, Player]:
    answers = iter((a, b))
    solver = Player(0, lambda text: next(answers))
    selector = Player(1, lambda text: choice)
    made = workflow("solver_selector", {**OPTIONS, **options}, {"code": 0, "chooser": 1})
    sessions: Any = {0: solver, 1: selector}
    trajectory = asyncio.run(made.run(task_of(task, 0, 1), sessions, Marks()))
    check_record(trajectory)
    return trajectory, solver, selector


TABLE = [
    # A, B, choice; what A, B and the selector earn, outcome
    ("right", "right", A, 1, 1, 0.5, 1),
    ("right", "right", B, 1, 1, 0.5, 1),
    ("wrong", "wrong", A, 0, 0, 0.5, 0),
    ("wrong", "wrong", B, 0, 0, 0.5, 0),
    ("right", "wrong", A, 1, 0, 1, 1),
    ("right", "wrong", B, 1, 0, 0, 0),
    ("wrong", "right", A, 0, 1, 0, 0),
    ("wrong", "right", B, 0, 1, 1, 1),
    ("wrong", "right", UNREAD, 0, 1, 0, 0),
    ("right", "wrong", UNREAD, 1, 0, 0, 1),
    ("right", "right", UNREAD, 1, 1, 0, 1),
    ("wrong", "wrong", UNREAD, 0, 0, 0, 0),
]


@pytest.mark.parametrize(("a", "b", "choice", "first", "second", "selector", "outcome"), TABLE)
def test_every_cell_of_the_reward_table(
    task: Task, a: str, b: str, choice: str, first: float, second: float, selector: float, outcome: float
) -> None:
    trajectory, _, _ = play(task, a, b, choice)
    assert earned(trajectory) == {"solver_a": first, "solver_b": second, "selector": selector, "outcome": outcome}
    assert [(s.role, s.policy) for s in trajectory.sequences] == [("solver_a", 0), ("solver_b", 0), ("selector", 1)]
    assert trajectory.metrics == {
        "unread": float(choice == UNREAD), "apart": float(a != b), "first": float(choice != B)
    }  # fmt: skip
    paid, _, _ = play(task, a, b, choice, rewards="outcome")
    assert earned(paid) == {"outcome": outcome}


def test_both_answers_come_from_one_prompt_and_two_seeds_and_are_shown_to_the_selector(task: Task) -> None:
    _, solver, selector = play(task, "one", "two", A)
    assert solver.asked == ["solve q"] * 2 and selector.asked == ["choose q one two"]
    assert len({s.seed for s in (*solver.samplings, *selector.samplings)}) == 3
    assert {p.prompt_id for p in solver.prompts} == {f"{task.prompt.prompt_id}/solver"}


@pytest.mark.parametrize("silence", [TOO_LONG, NOTHING])
def test_a_selector_that_says_nothing_leaves_the_first_answer(task: Task, silence: str) -> None:
    trajectory, _, _ = play(task, "wrong", "right", silence)
    assert earned(trajectory) == {"solver_a": 0, "solver_b": 1, "outcome": 0}
    assert trajectory.status == "train" and len(trajectory.sequences) == 2


def test_a_choice_that_is_cut_off_is_none(task: Task) -> None:
    trajectory, _, _ = play(task, "wrong", "right", f"{CUT}<final>B")
    assert earned(trajectory)["selector"] == 0 and trajectory.end_reason == "length"


def test_programs_are_shown_without_what_stands_around_them(task: Task) -> None:
    code = "def f(x):\n    return x + 1"
    fenced = f"Here:\n```python\n{code}\n```\nDone."
    short = "```python\nf = 1\n```"
    _, _, selector = play(task, fenced, short, A, shows="code")
    assert selector.asked == [f"choose q {code} "], "blocks of fewer than 20 characters are no programs"
    _, _, selector = play(task, fenced, short, A, shows="code", least_code=3)
    assert selector.asked == [f"choose q {code} f = 1"]


@pytest.mark.parametrize(
    ("text", "choice"),
    [(A, "A"), ("<FINAL> b </final>", "B"), (f"{A} or rather {B}", "B"), ("B", ""), ("<final>C</final>", ""), ("", "")],
)
def test_choices_are_read_from_the_last_tag(text: str, choice: str) -> None:
    assert choice_of(text) == choice
