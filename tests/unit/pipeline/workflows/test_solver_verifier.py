"""Solver and verifier: every cell of the reward table, in both ways of paying, and roles that fail to answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from role_play import BROKEN, CUT, NOTHING, TOO_LONG, Marks, Player, earned, task_of, workflow

from headrace.connectors.engines.engine import PromptTooLong
from headrace.pipeline.rewards.reward import RewardFailed
from headrace.pipeline.workflows.solver_verifier import verdict_of
from headrace.pipeline.workflows.workflow import EpisodeFailed
from headrace.schemas.checks import check_record
from headrace.schemas.records import Record, Task, Trajectory

ROLES = {
    "solver": {"prompt": "solve {question}"},
    "verifier": {"prompt": "verify {question} {attempt}"},
    "retry": {"prompt": "retry {question} {attempt} {feedback}"},
}
YES, NO = "<verify>approve</verify>", "<verify>reject</verify>"


@pytest.fixture
def task(examples: dict[str, Record]) -> Task:
    found: Any = examples["Task"]
    return found


def play(
    task: Task, first: str, verdict: str, second: str = "", *, shared: bool = False, **options: Any
) -> tuple[Trajectory, dict[str, Player]]:
    def says(text: str) -> str:
        return {"solve": first, "verify": verdict, "retry": second}[text.split()[0]]

    policies = {"main": 0} if shared else {"math": 0, "judge": 1}
    players = {name: Player(index, says) for name, index in policies.items()}
    made = workflow("solver_verifier", {**ROLES, **options}, policies)
    asked = task_of(task, *policies.values())
    sessions: Any = {player.policy: player for player in players.values()}
    trajectory = asyncio.run(made.run(asked, sessions, Marks({"half": 0.5, "most": 0.75})))
    check_record(trajectory)
    return trajectory, players


TABLE = [
    # solver, verdict, retry; what solver, verifier and retry earn, outcome
    ("right", YES, "", 1, 1, None, 1),
    ("right", NO, "wrong", 1, 0, 0, 0),
    ("right", NO, "right", 1, 0, 1, 1),
    ("wrong", NO, "right", 0, 1, 1, 1),
    ("wrong", NO, "wrong", 0, 1, 0, 0),
    ("wrong", YES, "", 0, 0, None, 0),
    ("right", "no idea", "", 1, 0, None, 1),
    ("wrong", "no idea", "", 0, 0, None, 0),
    ("most", YES, "", 0.75, 1, None, 0.75),
    ("half", NO, "most", 0.5, 1, 0.75, 0.75),
]


@pytest.mark.parametrize(("first", "verdict", "second", "solver", "verifier", "retry", "outcome"), TABLE)
def test_every_cell_of_the_reward_table(
    task: Task, first: str, verdict: str, second: str, solver: float, verifier: float, retry: float, outcome: float
) -> None:
    trajectory, _ = play(task, first, verdict, second)
    wanted = {"solver": solver, "verifier": verifier, "outcome": outcome} | ({"retry": retry} if second else {})
    assert earned(trajectory) == wanted
    assert [s.role for s in trajectory.sequences] == ["solver", "verifier"] + (["retry"] if second else [])
    assert [s.policy for s in trajectory.sequences] == [0, 1] + ([0] if second else [])
    assert trajectory.metrics["retried"] == bool(second)
    assert trajectory.metrics["approved"] == (verdict != NO)


@pytest.mark.parametrize(("first", "verdict", "second", "solver", "verifier", "retry", "outcome"), TABLE)
def test_paid_by_outcome_all_roles_get_1_or_0_for_the_final_answer(
    task: Task, first: str, verdict: str, second: str, solver: float, verifier: float, retry: float, outcome: float
) -> None:
    trajectory, _ = play(task, first, verdict, second, rewards="outcome")
    (part,) = trajectory.rewards
    assert (part.name, part.role, part.value) == ("outcome", "", float(outcome > 0.5))
    assert trajectory.reward == float(outcome > 0.5)


def test_roles_see_what_they_are_to_see_and_sample_with_seeds_of_their_own(task: Task) -> None:
    _, players = play(task, "first {feedback}", f"because {NO}", "second")
    assert players["math"].asked == ["solve q", f"retry q first {{feedback}} because {NO}"]
    assert players["judge"].asked == ["verify q first {feedback}"]
    seeds = [sampling.seed for player in players.values() for sampling in player.samplings]
    assert len(set(seeds)) == 3
    ids = [prompt.prompt_id for player in players.values() for prompt in player.prompts]
    assert ids == [f"{task.prompt.prompt_id}/solver", "", ""], "only what the row alone decides is remembered"


def test_one_policy_may_play_everything(task: Task) -> None:
    trajectory, _ = play(task, "wrong", NO, "right", shared=True)
    assert {(s.role, s.policy) for s in trajectory.sequences} == {("solver", 0), ("verifier", 0), ("retry", 0)}
    assert [(part.role, part.tokens) for part in trajectory.roles] == [
        (s.role, int(s.mask.sum())) for s in trajectory.sequences
    ]


def test_without_retries_a_rejection_is_only_a_verdict(task: Task) -> None:
    trajectory, players = play(task, "wrong", NO, "right", retries=0)
    assert earned(trajectory) == {"solver": 0, "verifier": 1, "outcome": 0} and len(players["math"].asked) == 1


@pytest.mark.parametrize("silence", [TOO_LONG, NOTHING])
def test_a_verifier_that_says_nothing_approves_and_is_left_out(task: Task, silence: str) -> None:
    trajectory, _ = play(task, "right", silence)
    assert trajectory.status == "train" and earned(trajectory) == {"solver": 1, "outcome": 1}
    assert [s.role for s in trajectory.sequences] == ["solver"] and trajectory.metrics["unread"] == 1


@pytest.mark.parametrize("silence", [TOO_LONG, NOTHING])
def test_a_retry_that_says_nothing_leaves_the_first_answer(task: Task, silence: str) -> None:
    trajectory, _ = play(task, "right", NO, silence)
    assert earned(trajectory) == {"solver": 1, "verifier": 0, "outcome": 1} and trajectory.metrics["retried"] == 0


def test_what_is_cut_off_is_judged_as_it_is(task: Task) -> None:
    trajectory, _ = play(task, f"{CUT}right", f"{CUT}<verify>rej")
    assert earned(trajectory) == {"solver": 0, "verifier": 0, "outcome": 0}
    assert (trajectory.status, trajectory.end_reason) == ("train", "length")
    assert all(s.mask.any() for s in trajectory.sequences)


def test_without_a_first_answer_there_is_no_episode(task: Task) -> None:
    with pytest.raises(PromptTooLong):
        play(task, TOO_LONG, YES)
    with pytest.raises(EpisodeFailed, match="no token was sampled"):
        play(task, NOTHING, YES)
    with pytest.raises(EpisodeFailed, match="log-prob of sampled token 0 is nan"):
        play(task, "right", BROKEN)


def test_a_reward_that_fails_excludes_the_episode_and_leaves_nothing_running(task: Task) -> None:
    async def both() -> int:
        with pytest.raises(RewardFailed):
            made = workflow("solver_verifier", ROLES, {"math": 0, "judge": 1})
            players: Any = {p: Player(p, lambda text: "raises") for p in (0, 1)}
            await made.run(task_of(task, 0, 1), players, Marks())
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(both()) == 1


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (YES, "approve"),
        ("x < VERIFY >\n Reject </ verify > y", "reject"),
        (f"{NO} then {YES}", "reject"),
        (f"I would approve it. {NO}", "reject"),
        ("I approve", "approve"),
        ("REJECT!", "reject"),
        ("approve, approve", "approve"),
        ("approve or reject", ""),
        ("disapprove", ""),
        ("<verify>maybe</verify>", ""),
        ("", ""),
        ("☃ <verify>approve", "approve"),
    ],
)
def test_verdicts_are_read_as_they_are_meant(text: str, verdict: str) -> None:
    assert verdict_of(text) == verdict


@given(st.text(max_size=200))
def test_any_text_is_a_verdict_or_none(text: str) -> None:
    assert verdict_of(text) in ("approve", "reject", "")
