"""The operators before rollout in their place: order, scope, names, bounds, errors, and what the ledger says of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from stage_feed import make_config, make_demand, make_driver, make_prompt, make_step, of_type

from headrace.pipeline import flow
from headrace.pipeline.operators.prompt_operator import Candidate, Outcome, PromptContext, PromptOperator
from headrace.pipeline.prompt_chain import PromptChain, resolved
from headrace.pipeline.runtime.driver import Counts, TopologyDriver
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Source
from headrace.schemas.records import Admission, Closed, End, Kept, Opened, Prompt, Skipped, Taken


class Recording(PromptOperator):
    """Admits all, and keeps what it is told."""

    heard: list[Any] = []  # noqa: RUF012 - emptied by each test

    def __init__(self, configuration: Any) -> None:
        self._given = configuration

    def process(self, candidate: Candidate, context: PromptContext) -> None:
        self.heard.append(("asked", candidate.prompt.prompt_id, candidate.in_flight))
        context.admit()

    def outcome(self, outcome: Outcome, context: PromptContext) -> None:
        self.heard.append(("outcome", outcome.prompt.prompt_id, outcome.rewards, outcome.complete))

    def moved(self, version: int, context: PromptContext) -> None:
        self.heard.append(("version", version))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a recording operator hears; it stands in for ``accept_all``."""
    monkeypatch.setattr("headrace.pipeline.operators.accept_all.AcceptAll", Recording)
    Recording.heard.clear()
    return Recording.heard


def fed(config: RunConfig, *prompts: Prompt) -> TopologyDriver:
    driver = make_driver(config, "schedule")
    for prompt in prompts:
        driver.append("prompts", prompt)
    driver.append("demand", make_demand(capacity=9999, versions=dict.fromkeys(range(len(config.policies)), 1 << 30)))
    driver.settle()
    return driver


def deep(*operators: dict[str, Any], **more: Any) -> RunConfig:
    return make_config(policies={"main": {"model": "none", "depth": 50}}, operators=operators, **more)


def groups(driver: TopologyDriver) -> list[str]:
    return [a.prompt_id for a in of_type(driver, "admissions", Admission)]


def test_a_skipped_prompt_stands_in_the_ledger_with_its_reason_and_place() -> None:
    driver = fed(
        deep({"type": "curriculum", "ceiling": [[0, 5]]}),
        *(make_prompt(n) for n in range(2)),
    )
    assert groups(driver) == []
    first, second = of_type(driver, "ledger", Skipped)
    assert (first.policy, first.stream, first.prompt_id, first.epoch, first.position) == (0, "main", "main-0", 0, 0)
    assert (first.operator, first.reason) == ("curriculum", "difficulty_unknown")
    assert first.detail == "column 'difficulty' holds '', no number"
    assert second.sources == [Source(topic="prompts", partition=0, offset=1)]
    key = (("operator", "curriculum"), ("reason", "difficulty_unknown"), ("stream", "main"))
    assert driver.metrics.counters["prompts_skipped", key] == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_outcomes_come_once_a_group_and_say_whether_it_was_complete(heard: list[Any], order: tuple[int, int]) -> None:
    """Of a group of two policies the operator hears what it brought its own, whichever ledger is read first."""
    config = make_config(
        policies={"a": {"model": "none", "depth": 9}, "b": {"model": "none", "depth": 9}},
        operators=[{"type": "accept_all", "policy": "b"}],
    )
    driver = fed(config, *(make_prompt(n) for n in range(4)))
    heard.clear()
    for policy in (*order, *order):
        driver.append("ledger", Kept(policy=policy, group=0, raw_rewards=[policy, 0.0]), partition=policy)
        driver.crash("schedule")
        driver.settle()
    for policy in order:
        failed = Closed(
            policy=policy,
            group=1,
            reason="failed",
            by="assemble",
            raw_rewards=[1.0, policy][: 1 + policy],
            complete=False,
        )
        driver.append("ledger", failed, partition=policy)
    driver.append("ledger", Closed(policy=0, group=2, reason="stale", by="batch"))
    driver.append("ledger", Closed(policy=0, group=99, reason="filtered", by="assemble"))
    driver.append("steps", make_step(1))
    driver.append("steps", make_step(2, policy=1), partition=1)
    driver.settle()
    assert heard == [
        ("outcome", "main-0", (1.0, 0.0), True),
        ("outcome", "main-1", (1.0, 1.0), False),
        ("version", 2),
    ]


def test_of_a_group_that_its_policy_has_no_part_in_an_operator_hears_from_the_first_that_has(heard: list[Any]) -> None:
    config = make_config(
        policies={"a": {"model": "none", "depth": 9}, "b": {"model": "none", "depth": 0}},
        operators=[{"type": "accept_all", "policy": "b"}],
    )
    driver = fed(config, *(make_prompt(n) for n in range(3)))
    opened = {r.group for r in of_type(driver, "ledger", Opened, 1)}
    assert opened == {0, 1}, "b has room for a batch of two"
    heard.clear()
    driver.append("ledger", Kept(policy=0, group=2, raw_rewards=[1.0, 0.0]))
    driver.settle()
    assert heard == [("outcome", "main-2", (1.0, 0.0), True)]


def test_open_groups_of_a_prompt_are_counted_until_they_end_or_bring_something(heard: list[Any]) -> None:
    same = [make_prompt(0)] * 3
    driver = fed(deep({"type": "accept_all"}, retries=0), *same)
    assert [h[2] for h in heard] == [0, 1, 2]
    heard.clear()
    driver.crash("schedule")
    driver.append("ledger", Kept(policy=0, group=0, raw_rewards=[0.0, 1.0]))
    driver.append("ledger", Closed(policy=0, group=1, reason="stale", by="batch"))
    driver.settle()
    driver.append("prompts", make_prompt(0))
    driver.settle()
    assert [h[2] for h in heard if h[0] == "asked"] == [1], "group 2 is open; what a restart read counts"


def test_a_retry_is_not_asked_about_again(heard: list[Any]) -> None:
    driver = fed(deep({"type": "accept_all"}), make_prompt(0))
    driver.append("ledger", Closed(policy=0, group=0, reason="failed", by="assemble", complete=False))
    driver.settle()
    assert [a.retry for a in of_type(driver, "admissions", Admission)] == [0, 1]
    assert [h[0] for h in heard] == ["asked", "outcome"]


def test_operators_act_on_their_stream_and_policy_only() -> None:
    config = make_config(
        policies={"a": {"model": "none"}, "b": {"model": "none"}},
        operators=[
            {"type": "curriculum", "ceiling": [[0, 1]], "stream": "two"},
            {"type": "mix", "by": "task_type", "weights": {"x": 1}, "policy": "b"},
        ],
    )
    streams = {
        "one": config.streams["main"].model_copy(update={"policies": ["a"]}),
        "two": config.streams["main"].model_copy(update={"policies": ["a"]}),
        "three": config.streams["main"],
    }
    driver = fed(config.model_copy(update={"streams": streams}), *(make_prompt(0, name) for name in streams))
    assert groups(driver) == ["one-0"]
    skipped = {r.stream: r for p in (0, 1) for r in of_type(driver, "ledger", Skipped, p)}
    assert {name: (r.operator, r.policy) for name, r in skipped.items()} == {
        "two": ("curriculum", 0),
        "three": ("mix", 1),
    }


def test_after_so_many_skips_the_next_prompt_passes_also_across_restarts() -> None:
    driver = fed(deep({"type": "curriculum", "ceiling": [[0, -1]], "max_skips": 3}))
    for number in range(9):
        driver.append("prompts", make_prompt(number))
        driver.turn("schedule", crash="before_commit")
        driver.turn("schedule", crash="after_commit")
    assert groups(driver) == ["main-3", "main-7"]
    assert [r.position for r in of_type(driver, "ledger", Skipped)] == [0, 1, 2, 4, 5, 6, 8]


def test_an_operator_that_raises_skips_by_name_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PromptOperator, candidate: Candidate, context: PromptContext) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr("headrace.pipeline.operators.accept_all.AcceptAll.process", broken)
    driver = fed(deep({"type": "accept_all"}), make_prompt(0))
    (record,) = of_type(driver, "ledger", Skipped)
    assert (record.operator, record.reason) == ("accept_all", "broken")
    assert re.fullmatch(r"raised KeyError: 'no such thing' \(test_prompt_chain.py:\d+\)", record.detail)
    assert driver.metrics.total("operator_errors") == 1


@pytest.mark.parametrize("answer", [None, ["main", "other"], ValueError("which one")])
def test_an_operator_that_cannot_choose_a_stream_has_no_say(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def select(self: PromptOperator, present: Any, absent: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("headrace.pipeline.operators.accept_all.AcceptAll.select", select)
    driver = fed(deep({"type": "accept_all"}), make_prompt(0), make_prompt(1))
    assert groups(driver) == ["main-0", "main-1"]
    assert driver.metrics.total("operator_errors") >= 2


def test_an_operator_that_cannot_open_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.pipeline.operators.accept_all.AcceptAll.open", lambda *_: 1 / 0)
    with pytest.raises(ConfigurationError, match=r"operators\[0\] \(accept_all\) cannot open: it raised ZeroDivision"):
        fed(deep({"type": "accept_all"}))


def test_words_that_may_not_travel_are_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headrace.pipeline.operators.accept_all.AcceptAll.process", lambda _, x, c: c.drop("no\ud800", "\ud800" * 5000)
    )
    driver = fed(deep({"type": "accept_all"}), make_prompt(0))
    (record,) = of_type(driver, "ledger", Skipped)
    assert (record.reason, record.detail) == ("no?", "?" * 1000)


def test_nothing_is_asked_while_no_group_could_open(heard: list[Any]) -> None:
    driver = make_driver(make_config(operators=[{"type": "accept_all"}]), "schedule")
    driver.append("prompts", make_prompt(0))
    driver.settle()
    assert heard == [], "no worker has room"
    driver.append("demand", make_demand(capacity=1, versions={0: 9}))
    driver.settle()
    assert len(heard) == 1


def test_sources_of_several_streams_are_told_how_far_schedule_is() -> None:
    config = deep(trainer={"batch_groups": 9})
    both = config.model_copy(update={"streams": {"main": config.streams["main"], "other": config.streams["main"]}})
    prompts = [make_prompt(n, s) for n in range(130) for s in ("main", "other")]
    taken = [r for r in fed(both, *prompts).records("run") if isinstance(r, Taken)]
    assert sorted((r.stream, r.position) for r in taken) == [
        ("main", 64), ("main", 128), ("other", 64), ("other", 128)
    ]  # fmt: skip
    alone = fed(config, *(make_prompt(n) for n in range(130)))
    assert alone.records("run") == [], "one stream has nobody to leave room for"


def test_prompts_are_read_on_while_a_stream_is_absent() -> None:
    config = make_config(operators=[{"type": "mix", "weights": {"main": 1, "other": 1}}])
    both = config.model_copy(update={"streams": {"main": config.streams["main"], "other": config.streams["main"]}})
    driver = fed(both, *(make_prompt(n) for n in range(300)), make_prompt(0, "other"))
    assert groups(driver)[:2] == ["main-0", "other-0"], "it was found behind 300 prompts of the other stream"
    assert groups(driver)[2:] == ["main-1"], "then it is other's turn"
    driver.append("prompts", End(reason="epochs", stream="other"))
    driver.settle()
    assert len(groups(driver)) == 4, "which has ended"


def test_settings_apply_once_and_where_they_are_meant_for() -> None:
    config = make_config(operators=[{"type": "admission", "depth": 2}, {"type": "replicate", "extra": 1}])
    made = resolved(config)
    assert made == resolved(made) and made.operators == config.operators
    assert resolved(make_config()) == make_config()
    driver = fed(config, *(make_prompt(n) for n in range(20)))
    assert len(of_type(driver, "ledger", Opened)) == 6, "3 batches of 2 groups"


def test_orders_that_cannot_work_are_refused() -> None:
    for operators, says in (
        ([{"type": "greso"}, {"type": "admission", "depth": 1}], "stands after greso"),
        ([{"type": "dynamic_sampling"}, {"type": "mix", "weights": {"main": 1}}], "stands after dynamic_sampling"),
        ([{"type": "greso"}, {"type": "greso", "preset": "astraflow"}], "stands at .* too for stream main"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            flow.validate(make_config(operators=operators))
    flow.validate(make_config(operators=[{"type": "filter_solved"}, {"type": "greso"}, {"type": "dynamic_sampling"}]))


def test_a_chain_without_operators_lets_everything_pass() -> None:
    chain = PromptChain(make_config())
    assert chain.select(["a", "b"], ["c"], Counts()) == ["a", "b"]
    driver = fed(make_config(), make_prompt(0))
    assert groups(driver) == ["main-0"]
