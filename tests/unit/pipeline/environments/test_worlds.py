"""The worlds that are shipped: decided by their seeds, solvable, and deaf to nonsense."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline.environments.environment import Environment, Observation, make_environment
from headrace.pipeline.environments.household import Household, HouseholdOptions, make_house
from headrace.pipeline.environments.ranking import Document, Index
from headrace.pipeline.environments.search import Search, SearchOptions, make_world, normal
from headrace.pipeline.environments.shop import Shop, ShopOptions, make_shop
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Prompt

WORLDS = ("arithmetic", "household", "search", "shop")


def prompt(text: str = "", answer: str = "") -> Prompt:
    return Prompt(prompt_id="1", stream="s", dataset="d", row=0, epoch=0, position=0, prompt=text, answer=answer)


LONG = 400_000
"""Letters of an action at which anything that grows with their square takes minutes."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("part", ["x", "\n", "search[", "<search>", "<action>", "</action>", "<think>", "</think>"])
def test_a_long_action_that_means_nothing_is_answered_while_the_worker_waits(name: str, part: str) -> None:
    world = make_environment(name, {})
    world.reset(1, prompt())
    assert isinstance(world.step(part * (LONG // len(part))), Observation)
    world.close()


@pytest.mark.parametrize("name", WORLDS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(-(2**31), 2**63), actions=st.lists(st.text(max_size=40), max_size=6))
def test_equal_seeds_and_actions_give_equal_episodes(name: str, seed: int, actions: list[str]) -> None:
    worlds = [make_environment(name, {}) for _ in range(2)]
    seen = [world.reset(seed, prompt()) for world in worlds]
    assert seen[0] == seen[1] and seen[0].text
    for action in actions:
        if seen[0].done:
            break
        seen = [world.step(action) for world in worlds]
        assert seen[0] == seen[1]
    for world in worlds:
        world.close()
        world.close()
        with pytest.raises(ValueError, match="call reset first"):
            world.step("look")


@pytest.mark.parametrize("name", WORLDS)
def test_seeds_make_different_episodes(name: str) -> None:
    world = make_environment(name, {})
    assert len({world.reset(seed, prompt()).text for seed in range(30)}) > 10


def craft(world: Environment, house: Any, thing: str, count: int = 1) -> Observation:
    """Make things the straight way: fetch or make the parts, then craft."""
    seen = Observation("")
    for _ in range(count):
        if thing not in house.recipes:
            room = next(name for name, things in house.rooms.items() if thing in things)
            world.step(f"go {room}")
            seen = world.step(f"I need it.\n<action>take {thing}</action>")
        else:
            for part, number in house.recipes[thing].items():
                craft(world, house, part, number)
            seen = world.step(f"craft {thing}")
        assert seen.text.startswith(("Bag:", "You made")), seen
    return seen


@pytest.mark.parametrize("seed", range(25))
def test_every_goal_of_the_household_can_be_made(seed: int) -> None:
    options = HouseholdOptions(levels=1 + seed % 3, rooms=1 + seed % 6)
    world, house = Household(options), make_house(seed, options)
    assert f"Make: {house.goal}." in world.reset(seed, prompt()).text
    seen = craft(world, house, house.goal)
    assert (seen.reward, seen.done, seen.details) == (1.0, True, {"verdict": "made"})


def test_the_household_says_what_cannot_be_done_and_takes_nothing_for_it() -> None:
    options = HouseholdOptions()
    world, house = Household(options), make_house(3, options)
    first = world.reset(3, prompt("Be quick."))
    assert first.text.startswith("Be quick.\nMake: ")
    thing = house.goal
    for action, says in (
        (f"craft {thing}", "You lack "), ("craft moon", "Nobody knows how"), ("go hell", "There is no room"),
        ("take moon", "There is no 'moon' here"), ("fly", "There is no command 'fly'"), ("", "There is no command"),
        (f"recipe {thing}", f"{thing}: "), ("delegate", "Delegate what?"),
    ):  # fmt: skip
        seen = world.step(action)
        assert seen.text.startswith(says) and not seen.done and seen.reward == 0.0, (action, seen)
    assert "Bag: nothing" in world.step("look").text
    assert world.step("report too hard").details == {"verdict": "given up: too hard"}


def test_sub_agents_work_in_the_same_house() -> None:
    options = HouseholdOptions(depth=2)
    world, house = Household(options), make_house(4, options)
    world.reset(4, prompt())
    parts = Counter(house.recipes[house.goal])
    for part, number in parts.items():
        begun = world.step(f"delegate make {number} {part}")
        assert begun.agent == "begin" and f"Your task: make {number} {part}" in begun.text
        assert world.step("delegate more").agent == "begin"
        assert "nobody left" in world.step("delegate yet more").text
        assert world.step("report nothing").agent == "end"
        craft(world, house, part, number)
        ended = world.step(f"report I made {number} {part}")
        assert ended.agent == "end" and part in ended.text
    assert world.step(f"craft {house.goal}").done


def solve_search(world: Environment, question: str) -> Observation:
    asked = re.search(r"teacher of (\w+ \w+)", question)
    assert asked is not None
    found = world.step(f"<think>who?</think><search>{asked[1]}</search>").text
    teacher = re.search(rf"{asked[1]} is .* taught by (\w+ \w+)\.", found)
    assert teacher is not None, found
    found = world.step(f"<search>{teacher[1]}</search>").text
    fact = re.search(rf"{teacher[1]} is a (\w+), born in (\w+),", found)
    assert fact is not None
    return world.step(f"<answer> {fact[2 if 'born' in question else 1].upper()} </answer>")


@pytest.mark.parametrize("seed", range(20))
def test_questions_of_the_small_world_need_two_searches(seed: int) -> None:
    world = Search()
    _, question, _ = make_world(seed)
    assert world.reset(seed, prompt()).text == question
    seen = solve_search(world, question)
    assert (seen.reward, seen.done) == (1.0, True)
    world.reset(seed, prompt())
    assert world.step("<answer>nobody</answer>").reward == 0.0


def test_search_over_a_corpus_of_files(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"title": "Oslo", "text": "Oslo is the capital of Norway."}, {"title": "Ärö", "text": "An island. " * 99}]
    corpus.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    world = Search(SearchOptions(corpus=str(corpus), searches=1, characters=20))
    assert world.reset(1, prompt("Capital of Norway?", "the  Oslo!")).text == "Capital of Norway?"
    assert world.step("hm").details == {"verdict": "neither"}
    assert world.step("<search>ärö island</search>").text == (
        "\n<information>\n(1) Ärö: An island. An island\n</information>\n"
    )
    assert "no search left" in world.step("<search>oslo</search>").text
    assert world.step("<think><answer>Bergen</answer></think> <answer>Oslo</answer>").reward == 1.0
    broken = tmp_path / "broken.jsonl"
    broken.write_text('\n{"title": "x"}\n')
    with pytest.raises(ConfigurationError, match=r"line 2: KeyError\('text'\)"):
        make_environment("search", {"corpus": str(broken)})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        make_environment("search", {"corpus": str(tmp_path / "none.jsonl")})


def test_answers_compare_without_case_articles_and_marks() -> None:
    assert normal("The  Eiffel-Tower!") == normal("eiffel tower") != normal("eiffel towers")


def test_ranking_prefers_rare_words_and_short_documents() -> None:
    index = Index([Document("a", "red red hat"), Document("b", "blue hat"), Document("c", "blue hat " + "x " * 50)])
    assert [d.title for d in index.search("blue hat", 9)] == ["b", "c", "a"]
    assert index.search("moon", 9) == [] and index.search("", 9) == []
    assert Index([]).search("x", 3) == []


def buy(world: Environment, kind: str, size: str, product: str, page: int) -> Observation:
    seen = world.step(f"search[{kind}]")
    for _ in range(100):
        if f"[{product}]" in seen.text:
            break
        seen = world.step("click[next]")
    world.step(f"click[{product}]")
    world.step(f"<think>search[nothing]</think>click[{size}]")
    return world.step("click[buy]")


@pytest.mark.parametrize("seed", range(20))
def test_what_is_asked_for_can_be_bought(seed: int) -> None:
    options = ShopOptions(products=40, page=1 + seed % 6)
    world = Shop(options)
    _, wish = make_shop(seed, options)
    assert wish.product.title in world.reset(seed, prompt()).text
    seen = buy(world, wish.product.title, wish.size, wish.product.code, options.page)
    assert (seen.reward, seen.done) == (1.0, True) and wish.product.title in seen.details["verdict"]
    world.reset(seed, prompt())
    assert buy(world, wish.product.title, "none", wish.product.code, options.page).reward == 0.8


def test_the_shop_says_what_cannot_be_clicked() -> None:
    world = Shop()
    world.reset(1, prompt())
    for action in ("click[buy]", "click[B001]", "click[next]", "click[moon]"):
        assert world.step(action).details == {"verdict": "no such button"}
    assert world.step("buy it").details == {"verdict": "no command"}
    assert world.step("search[zebra]").text == "Nothing was found. [back]"
    other = next(p for p in make_shop(1, ShopOptions())[0] if p.kind != make_shop(1, ShopOptions())[1].product.kind)
    world.step(f"search[{other.title}]")
    assert buy(world, other.title, "small", other.code, 5).reward == 0.0


@pytest.mark.parametrize(
    ("said", "query"),
    [("search[red [bag]]", "red [bag]"), ("I search[a] click[b]", "a] click[b"), ("]search[a]", "a"), ("search[]", "")],
)
def test_a_command_of_the_shop_goes_to_the_last_bracket(said: str, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    world = Shop(ShopOptions())
    world.reset(1, prompt())
    monkeypatch.setattr(world._index, "search", lambda words, most: asked.append(words) or [])
    world.step(said)
    assert asked == [query]


def test_mathematics_is_compared_as_such() -> None:
    pytest.importorskip("math_verify")
    world = make_environment("math", {"attempts": 2})
    assert world.reset(0, prompt("Half?", "\\frac{1}{2}")).text == "Half?"
    assert "Attempts left: 1" in world.step("I say \\boxed{0.4}").text
    seen = world.step("<think>\\boxed{3}</think> so \\boxed{0.5}")
    assert (seen.reward, seen.done, seen.details["verdict"]) == (0.5, True, "right")
    world.reset(0, prompt("Half?", "\\frac{1}{2}"))
    world.step("\\boxed{1}")
    assert world.step("no idea").details["verdict"] == "wrong"
