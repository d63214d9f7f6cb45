"""Roles: who plays them, how they are asked, and what is refused before anything runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from role_play import Marks, Player, task_of

from headrace.pipeline.workflows.streams import evaluated_stream, evaluated_with, workflow_of
from headrace.pipeline.workflows.team import PLACES, Episode, RoleOptions, TeamOptions, beside, code_of, filled
from headrace.pipeline.workflows.team import policies_of as who
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Message
from headrace.schemas.records import Prompt, Record, Task

ASK = RoleOptions(prompt="{question}?")
THREE = {"solver": ASK, "verifier": ASK, "retry": ASK}
LIKE = {"retry": "solver"}


@pytest.fixture
def task(examples: dict[str, Record]) -> Task:
    found: Any = examples["Task"]
    return found


def named(**names: str) -> dict[str, RoleOptions]:
    return {role: RoleOptions(prompt="", policy=names.get(role, "")) for role in THREE}


@pytest.mark.parametrize(
    ("roles", "policies", "found"),
    [
        (THREE, {"a": 0}, {"solver": 0, "verifier": 0, "retry": 0}),
        (THREE, {"a": 0, "b": 1}, {"solver": 0, "verifier": 1, "retry": 0}),
        (THREE, {"a": 3, "b": 1}, {"solver": 3, "verifier": 1, "retry": 3}),
        (named(solver="b", verifier="a"), {"a": 0, "b": 1}, {"solver": 1, "verifier": 0, "retry": 1}),
        (named(retry="c"), {"a": 0, "b": 1, "c": 2}, {"solver": 0, "verifier": 1, "retry": 2}),
    ],
)
def test_who_plays_what(roles: dict[str, RoleOptions], policies: dict[str, int], found: dict[str, int]) -> None:
    assert who(roles, policies, LIKE) == found


def test_unknown_and_idle_policies_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"verifier\.policy names 'x'; policies of the stream are a, b"):
        who(named(verifier="x"), {"a": 0, "b": 1}, LIKE)
    with pytest.raises(ConfigurationError, match="policy 'c' of the stream plays no role"):
        who(THREE, {"a": 0, "b": 1, "c": 2}, LIKE)


def config(**options: Any) -> RunConfig:
    stream = {"dataset": "none", "workflow": "solver_verifier", "workflow_options": options}
    return RunConfig.model_validate(
        {"policies": {"a": {"model": "none"}, "b": {"model": "none"}}, "streams": {"sums": stream}}
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"solver": {"prompt": "{qestion}"}}, r"\{qestion\} stands for nothing; there are \{question\}"),
        ({"solver": {"prompt": "p", "policy": "z"}}, r"streams\.sums\.workflow_options\.solver\.policy names 'z'"),
        ({"sover": {"prompt": "p"}}, "sover"),
        ({"rewards": "both"}, "roles"),
        ({"solver": {}}, "prompt"),
        ({"solver": {"prompt": "p", "temperature": -2}}, "temperature"),
    ],
)
def test_options_that_cannot_work_are_refused_with_their_place(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as refused:
        workflow_of(config(**options), "sums")
    assert "streams.sums.workflow_options" in str(refused.value)


def test_members_of_a_team_are_evaluated_together_and_others_alone() -> None:
    team = config()
    assert (evaluated_with(team, 0), evaluated_with(team, 1)) == ((0, 1), (1, 0))
    section = team.streams["sums"].model_copy(update={"workflow": "single_turn", "policies": ["b"]})
    alone = team.model_copy(update={"streams": {"first": section, "sums": team.streams["sums"]}})
    assert (evaluated_stream(alone, 0), evaluated_stream(alone, 1)) == ("sums", "first")
    assert (evaluated_with(alone, 0), evaluated_with(alone, 1)) == ((0, 1), (1,))


@given(st.dictionaries(st.sampled_from(PLACES), st.text(max_size=20)), st.text(max_size=60))
def test_what_is_filled_in_is_never_filled_again(values: dict[str, str], template: str) -> None:
    assert filled("".join(f"{{{name}}}" for name in values), values) == "".join(values.values())
    assert filled(template, {}) == template


def test_the_last_block_that_is_long_enough_is_the_code() -> None:
    text = "```\nfirst block\n```\n```py\nsecond block\n```\n```\nx\n```"
    assert (code_of(text, 5), code_of(text, 1), code_of(text, 99), code_of("no code", 0)) == (
        "second block", "x", "", ""
    )  # fmt: skip


def asked(task: Task, form: str, system: str = "", **prompt: Any) -> Prompt:
    """The prompt that the role ``solver`` is asked."""
    roles = {"solver": RoleOptions(prompt="Solve {question}", system=system)}
    player = Player(0, lambda text: "right")
    options = TeamOptions(form=form)  # type: ignore[arg-type]
    sessions: Any = {0: player}
    episode = Episode(task_of(task, 0, **prompt), sessions, Marks(), options=options, roles=roles, who={"solver": 0})
    asyncio.run(episode.ask("solver"))
    (made,) = player.prompts
    return made


CHAT = [Message(role="system", content="old"), Message(role="user", content="a"), Message(role="user", content="q")]


def test_a_role_is_asked_in_the_form_of_the_row_or_in_another(task: Task) -> None:
    text = asked(task, "as_given", "You solve {question}.")
    assert (text.prompt, text.messages) == ("You solve q.\n\nSolve q", [])
    chat = asked(task, "as_given", "new", prompt="", messages=CHAT)
    assert [(m.role, m.content) for m in chat.messages] == [("system", "new"), ("user", "a"), ("user", "Solve q")]
    kept = asked(task, "as_given", prompt="", messages=CHAT)
    assert [m.role for m in kept.messages] == ["system", "user", "user"] and kept.messages[0].content == "old"
    assert [m.content for m in asked(task, "chat").messages] == ["Solve q"]
    assert asked(task, "text", prompt="", messages=CHAT).prompt == "Solve q"


def test_a_role_samples_as_its_options_say(task: Task) -> None:
    roles = {"solver": RoleOptions(prompt="p", max_new_tokens=5, temperature=0)}
    player = Player(0, lambda text: "right")
    sessions: Any = {0: player}
    episode = Episode(task_of(task, 0), sessions, Marks(), options=TeamOptions(), roles=roles, who={"solver": 0})
    said = asyncio.run(episode.ask("solver"))
    assert (player.samplings[0].max_new_tokens, player.samplings[0].temperature) == (5, 0)
    assert said.sequence is not None and not said.sequence.trainable


def test_a_row_without_an_id_is_not_remembered(task: Task) -> None:
    assert asked(replace(task, prompt=replace(task.prompt, prompt_id="")), "text").prompt_id == ""


def test_when_one_of_two_fails_the_other_ends() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    async def both() -> None:
        with pytest.raises(ValueError, match="no"):
            await beside(waits(), fails())
        await asyncio.sleep(0)

    asyncio.run(both())
    assert ended == ["cancelled"]
