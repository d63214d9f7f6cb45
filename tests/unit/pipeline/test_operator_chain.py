"""Operators in order, each with its own state and timers, each ending by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest
from stage_feed import make_config, make_members

from headrace.pipeline.operator_chain import Dropped, OperatorChain
from headrace.pipeline.operators.operator import GroupDraft, OperatorConfiguration, OperatorContext
from headrace.pipeline.runtime.driver import Counts
from headrace.pipeline.runtime.sqlite_store import StoreFile
from headrace.pipeline.runtime.store import MemoryStore, StoreView
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Group, Member


class AddConfiguration(OperatorConfiguration):
    amount: float = 1.0


class Add:
    """Adds to every shaped reward and counts the groups it has seen."""

    kind: ClassVar[Any] = "shape"
    Configuration: ClassVar[type[OperatorConfiguration]] = AddConfiguration
    timers: ClassVar[list[str]] = []

    def __init__(self, configuration: AddConfiguration) -> None:
        self.amount = configuration.amount
        self.seen = 0

    def open(self, context: OperatorContext) -> None:
        self.seen = int(context.store().get(b"seen") or 0)

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        self.seen += 1
        context.store().put(b"seen", str(self.seen).encode())
        context.schedule("later", 5)
        members = [replace(m, shaped_reward=m.shaped_reward + self.amount) for m in record.members]
        context.emit(record.with_members(members))

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        self.timers.append(f"{timer} after {context.store().get(b'seen')!r}")

    def close(self) -> None: ...


class Twice(Add):
    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        context.emit(record)
        context.drop("again", "twice")


class Never(Add):
    def process(self, record: GroupDraft, context: OperatorContext) -> None: ...


class NoDisk(Add):
    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        raise StoreFile("the state file cannot be read")


class DropAll(Add):
    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        context.drop("no", "never wanted")


class Emitting(Add):
    """Emits what it is told to make of the draft."""

    make: ClassVar[Any] = None

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        context.emit(type(self).make(record))


class Late(Add):
    def on_timer(self, timer: str, context: OperatorContext) -> None:
        context.drop("late", "the group has ended")


class Unopened(Add):
    def open(self, context: OperatorContext) -> None:
        raise KeyError("state")


class Foul(Add):
    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        context.drop("r" * 200, "a lone \ud800")


CLASSES = {
    "emitting": Emitting,
    "late": Late,
    "unopened": Unopened,
    "foul": Foul,
    "add": Add,
    "twice": Twice,
    "never": Never,
    "drop_all": DropAll,
    "no_disk": NoDisk,
}


class FakeContext:
    """The part of a stage's Context that the chain uses."""

    def __init__(self) -> None:
        self.metrics = Counts()
        self.memory = MemoryStore()
        self.armed: dict[str, int] = {}

    def now(self) -> int:
        return 0

    def store(self, name: str = "state") -> StoreView:
        return StoreView(self.memory, b"s")

    def schedule(self, key: str, at_ms: int) -> None:
        self.armed[key] = at_ms


@pytest.fixture(autouse=True)
def _classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.pipeline.operator_chain.operator_class", lambda entry: CLASSES[entry.type])


def run(*entries: dict[str, Any], context: Any = None) -> Any:
    chain = OperatorChain(make_config(operators=entries))
    context = context or FakeContext()
    chain.open(context)
    *members, group = make_members(0)
    draft = GroupDraft(group=cast(Group, group), members=tuple(cast(Member, m) for m in members), group_size=2)
    return chain.run(draft, context)


def test_operators_apply_in_order_and_statistics_follow() -> None:
    result = run({"type": "add"}, {"type": "add", "amount": 10})
    assert [m.shaped_reward for m in result.members] == [11.0, 12.0]
    assert (result.group.reward_mean, result.group.raw_mean) == (11.5, 0.5)


def test_operators_of_other_policies_and_streams_are_left_out() -> None:
    result = run({"type": "add", "policy": "other"}, {"type": "add", "stream": "other"}, {"type": "add"})
    assert [m.shaped_reward for m in result.members] == [1.0, 2.0]


def test_a_drop_ends_the_chain_by_name() -> None:
    assert run({"type": "drop_all"}, {"type": "twice"}) == Dropped("drop_all", "no: never wanted")


def test_an_operator_that_ends_a_group_twice_or_never_is_broken_by_name() -> None:
    never, twice = run({"type": "never"}), run({"type": "twice"})
    assert (never.operator, never.broken) == ("never", True)
    assert "neither emitted nor dropped" in never.detail
    assert (twice.operator, twice.broken) == ("twice", True)
    assert "ended one group twice" in twice.detail


def test_a_state_file_that_fails_ends_the_task_and_no_group() -> None:
    with pytest.raises(StoreFile):
        run({"type": "no_disk"})


def test_state_and_timers_are_apart_by_operator_and_come_back() -> None:
    context = FakeContext()
    entries = [{"type": "add"}, {"type": "add"}]
    run(*entries, context=context)
    run(entries[0], context=context)
    assert [value for _, value in context.store().scan(b"operator/")] == [b"2", b"1"]
    assert context.armed == {"operator/add...0/later": 5, "operator/add...1/later": 5}
    chain = OperatorChain(make_config(operators=entries))
    chain.open(cast(Any, context))
    Add.timers.clear()
    chain.on_timer("operator/add...1/later", cast(Any, context))
    assert Add.timers == ["later after b'1'"]


def other_members(draft: GroupDraft, **fields: Any) -> GroupDraft:
    return draft.with_members([replace(m, **fields) for m in draft.members])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda d: None, "a NoneType, and groups go on as a GroupDraft"),
        (lambda d: d.group, "a Group, and groups go on as a GroupDraft"),
        (lambda d: replace(d, group=replace(d.group, group=99)), "group 99 of policy 0 in the place"),
        (lambda d: replace(d, group=replace(d.group, policy=1)), "group 0 of policy 1 in the place"),
        (lambda d: d.with_members([*d.members, *d.members]), r"replicas \[0, 1, 0, 1\] of \[0, 1\]"),
        (lambda d: other_members(d, replica=7), r"replicas \[7, 7\]"),
        (lambda d: d.with_members([]), "no member to train"),
        (lambda d: other_members(d, status="baseline_only"), "no member to train"),
        (lambda d: other_members(d, status="wow"), "status 'wow' is none of"),
        (lambda d: other_members(d, shaped_reward=float("nan")), "is nan: it must be finite"),
        (lambda d: other_members(d, shaped_reward=float("inf")), "is inf: it must be finite"),
        (
            lambda d: replace(d, members=(replace(d.members[0], shaped_reward="x"), d.members[1])),
            "real number, not str",
        ),
        (lambda d: other_members(d, error="\ud800"), "a lone surrogate"),
        (lambda d: replace(d, members=d.members[:1]), "its Group counts other members than it has"),
    ],
)
def test_what_may_not_go_on_fails_its_group_by_name(make: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the task that holds all other groups too, or another group's credit."""
    monkeypatch.setattr(Emitting, "make", staticmethod(make))
    result = run({"type": "emitting"}, {"type": "add"})
    assert (result.operator, result.broken) == ("emitting", True)
    assert re.search(says, result.detail)
    assert "(test_operator_chain.py:" in result.detail, "the line of the operator is named"


def test_members_may_be_left_out_and_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Emitting, "make", staticmethod(lambda d: other_members(d, shaped_reward=5.0).with_members(d.members[1:]))
    )
    assert [m.replica for m in run({"type": "emitting"}).members] == [1]


def test_words_of_a_drop_are_made_to_travel() -> None:
    assert run({"type": "foul"}) == Dropped("foul", "r" * 100 + ": a lone ?")


def test_a_timer_that_raises_ends_no_task_and_no_group() -> None:
    context = FakeContext()
    chain = OperatorChain(make_config(operators=[{"type": "late"}]))
    chain.open(cast(Any, context))
    chain.on_timer("operator/late...0/later", cast(Any, context))
    assert context.metrics.total("operator_errors") == 1


def test_every_operator_that_was_opened_is_closed_once_whatever_another_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(Add, "close", lambda self: closed.append(type(self).__name__))
    monkeypatch.setattr(Never, "close", lambda self: closed[99])
    context = FakeContext()
    chain = OperatorChain(make_config(operators=[{"type": "add"}, {"type": "never"}, {"type": "late"}]))
    chain.close()
    assert not closed
    chain.open(cast(Any, context))
    chain.close()
    chain.close()
    assert closed == ["Late", "Add"]
    assert context.metrics.total("operator_errors") == 1


def test_a_timer_at_no_whole_millisecond_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Add, "process", lambda self, record, context: context.schedule("later", 0.5))
    assert "a timer is due at whole milliseconds, not at 0.5" in run({"type": "add"}).detail


def test_an_operator_that_cannot_open_is_named() -> None:
    with pytest.raises(
        ConfigurationError, match=r"operators\[1\] \(unopened\) cannot open: it raised KeyError: 'state'"
    ):
        run({"type": "add"}, {"type": "unopened"})


def test_state_stays_with_its_operator_when_others_come_before_it() -> None:
    """A run may go on with another list of operators; one must not read what another one wrote."""
    context = FakeContext()
    scoped = {"type": "add", "stream": "main"}
    run(scoped, context=context)
    chain = OperatorChain(make_config(operators=[{"type": "add"}, {"type": "late"}, scoped]))
    chain.open(cast(Any, context))
    assert [operator.seen for *_, operator in cast(Any, chain)._entries] == [0, 0, 1]


def test_a_bad_configuration_names_entry_type_and_key() -> None:
    with pytest.raises(ConfigurationError, match=r"operators\[1\] \(add\): amount: .*number"):
        run({"type": "add"}, {"type": "add", "amount": "much"})
