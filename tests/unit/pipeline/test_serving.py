"""Serving operators are found by kind, checked at start, and held to their contract at work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from serving_feed import ServingFeed, make_candidate, make_moment
from stage_feed import make_config

from headrace.pipeline import flow
from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.serving import Candidate, Moment
from headrace.pipeline.serving import SERVING_KINDS, Serving, ServingFailed
from headrace.schemas.errors import ConfigurationError

HERE = f"{__name__}:"


class _Part:
    Configuration: ClassVar[type[OperatorConfiguration]] = OperatorConfiguration
    answer: ClassVar[Any] = None

    def __init__(self, configuration: OperatorConfiguration) -> None: ...


class Ranking(_Part):
    kind: ClassVar[Any] = "order"

    def rank(self, candidate: Candidate, moment: Moment) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Choosing(_Part):
    kind: ClassVar[Any] = "replay"

    held: ClassVar[Any] = 99

    def capacity(self, batch_groups: int) -> Any:
        return self.held

    def choose(self, pool: Sequence[Candidate], count: int, moment: Moment) -> Any:
        return self.answer


class Placing(_Part):
    kind: ClassVar[Any] = "batch"

    def place(self, groups: Sequence[Candidate], lanes: int) -> Any:
        return self.answer


class Stricter(_Part):
    """Serves no group whose mean reward is 0."""

    kind: ClassVar[Any] = "staleness"

    def refusal(self, candidate: Candidate, moment: Moment) -> str:
        return "worthless: the mean is 0" if candidate.group.raw_mean == 0 else ""


CLASSES = {c.__name__: c for c in (Ranking, Choosing, Placing, Stricter)}


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the classes above stand for installed operators."""
    from headrace.pipeline import operator_chain, prompt_chain, serving

    real = operator_chain.operator_class

    def found(entry: Any) -> Any:
        return CLASSES.get(entry.type) or real(entry)

    for module in (operator_chain, prompt_chain, serving, flow):
        monkeypatch.setattr(module, "operator_class", found)


def serving(*types: str) -> Serving:
    return Serving(make_config(operators=[{"type": t} for t in types]), 0)


def test_where_none_is_named_the_usual_ones_are_in_force() -> None:
    usual = serving()
    assert [usual.name(kind) for kind in SERVING_KINDS] == ["", "", "", ""]
    old, new = make_candidate(2, oldest_version=1), make_candidate(1, oldest_version=2)
    assert usual.ranked([new, old], make_moment()) == [2, 1]
    assert usual.refusal(old, make_moment(start=9, bound=3)).startswith("too_old: ")
    assert usual.lanes([old, new], 2, make_moment()) == [0, 1]
    assert usual.replayed([], 3, make_moment()) == [] == usual.replayed([old], 0, make_moment())


@pytest.mark.parametrize(
    ("operators", "says"),
    [
        ([{"type": "edf"}, {"type": "fifo"}], r"operators\[1\] \(fifo\) is a second order for policy main, after edf"),
        ([{"type": "edf", "stream": "main"}], "a batch mixes streams; name a policy"),
        ([{"type": "replay", "ratio": 1}], r"operators\[0\] \(replay\): ratio: .*ratio is below 1"),
        ([{"type": "replay", "selector": "newest"}], r"operators\[0\] \(replay\): selector: "),
        ([{"type": "edf", "speed": 1}], r"operators\[0\] \(edf\): unknown key speed"),
        (
            [{"type": "edf"}, {"type": "replay"}],
            r"after edf \(order\), but the order is .*shape, statistics, filter",
        ),
        ([{"type": "batch"}, {"type": "length", "max_tokens": 9}], r"length, filter\) stands after batch \(batch\)"),
    ],
)
def test_a_composition_that_cannot_work_is_refused(operators: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        flow.validate(make_config(operators=operators))


def test_each_policy_has_its_own_and_the_topology_shows_them() -> None:
    operators = [
        {"type": "staleness"},
        {"type": "replay", "ratio": 0.5, "policy": "a"},
        {"type": "edf", "policy": "a"},
        {"type": "fifo", "policy": "b"},
        {"type": "batch", "balance": "groups"},
    ]
    config = make_config(policies={"a": {"model": "none"}, "b": {"model": "none"}}, operators=operators)
    flow.validate(config)
    assert [Serving(config, p).name("order") for p in (0, 1)] == ["edf", "fifo"]
    text = flow.describe(config)
    assert "  edf                order, a, in batch" in text
    assert "  staleness          staleness, everywhere, in batch" in text


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ZeroDivisionError("nothing"), "ZeroDivisionError: nothing"),
        (None, "TypeError"),
        ((float("nan"),), "which has no order"),
    ],
)
def test_an_order_that_fails_ends_the_part_by_name(answer: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranking, "answer", answer)
    with pytest.raises(
        ServingFailed, match=r"operator Ranking \(order\) cannot serve batch 3 of policy main: .*" + says
    ):
        serving("Ranking").ranked([make_candidate(1), make_candidate(2)], make_moment(3))


@pytest.mark.parametrize("answer", [[3], [1, 1], [1, 2, 4]])
def test_a_choice_outside_the_pool_twice_or_too_many_is_refused(
    answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Choosing, "answer", answer)
    pool = [make_candidate(n) for n in (1, 2, 4)]
    with pytest.raises(ServingFailed, match="not up to 2 different groups"):
        serving("Choosing").replayed(pool, 2, make_moment())


@pytest.mark.parametrize("answer", [[0], [0, 2], [0, -1], [0, 0.5]])
def test_lanes_that_there_are_not_are_refused(answer: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placing, "answer", answer)
    with pytest.raises(ServingFailed, match="lanes are 0 to 1"):
        serving("Placing").lanes([make_candidate(1), make_candidate(2)], 2, make_moment())


@pytest.mark.parametrize("answer", [None, False, 0])
def test_a_refusal_that_is_no_text_is_no_refusal(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that forgets to answer would drop every group by the reason None."""
    monkeypatch.setattr(Stricter, "refusal", lambda *_: answer)
    with pytest.raises(ServingFailed, match="which is no text"):
        serving("Stricter").refusal(make_candidate(1), make_moment())


@pytest.mark.parametrize("held", [None, -1, 2.5])
def test_a_pool_of_no_number_of_groups_is_refused(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choosing, "held", held)
    feed = ServingFeed({"type": "Choosing"}, size=2, replay=0.5)
    feed.open([0])
    with pytest.raises(
        ServingFailed, match=r"operator Choosing \(replay\) cannot serve batch 1 .* no number of groups"
    ):
        feed.keep(0)


def test_a_stricter_rule_closes_fresh_groups_and_bars_pooled_ones() -> None:
    feed = ServingFeed({"type": "Stricter"}, size=4, depth=3, replay=0.5)
    feed.open(range(5))
    feed.keep(0, raw_mean=0.0)
    feed.keep(1)
    feed.keep(2)
    assert feed.batches() == [[1, 2]]
    assert [(c.group, c.reason, c.operator, c.detail) for c in feed.closed()] == [
        (0, "stale", "Stricter", "worthless: the mean is 0")
    ]


def test_a_failing_operator_loses_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not committed did not happen: put right, the same groups make the batch."""
    monkeypatch.setattr(Ranking, "answer", ValueError("not today"))
    feed = ServingFeed({"type": "Ranking"})
    feed.open(range(2))
    feed.keep(0)
    with pytest.raises(ServingFailed, match="not today"):
        feed.keep(1)
    feed.driver.crash("batch")
    for task in feed.driver.tasks.values():  # the worker reads again from what it committed
        task.positions = dict.fromkeys(task.positions, 0)
    monkeypatch.setattr(Ranking, "answer", (0.0,))
    feed.driver.settle()
    assert feed.batches() == [[0, 1]]
    assert feed.closed() == []
