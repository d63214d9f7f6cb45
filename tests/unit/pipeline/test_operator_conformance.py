"""Every shipped operator keeps every promise, and an operator that breaks one is found by name."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from headrace.connectors.plugins import installed
from headrace.pipeline import serving_conformance
from headrace.pipeline.operator_conformance import assert_conforms, conformance
from headrace.pipeline.operators.operator import GroupDraft, OperatorConfiguration, OperatorContext
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Closed

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "accept_all": [{}],
    "admission": [{"depth": 0.5}, {"alpha": 2}],
    "curriculum": [
        {"bounds": [1, 3], "phases": [{"weights": [1, 1, 0]}, {"start": 1, "weights": [1, 2, 1]}]},
        {"ceiling": [[0, 1], [2, 4]]},
    ],
    "filter_solved": [{"decay": 0.3, "threshold": 0.8}],
    "greso": [{"warm_up": 3}, {"preset": "greso_repo", "hard_reward": 0.0}],
    "mix": [{"weights": {"main": 1}}, {"by": "task_type", "weights": {"even": 1, "odd": 3}}],
    "replicate": [{"preset": "flaky"}],
    "batch": [{"balance": "groups"}],
    "dedup": [{"window": 6}, {"action": "drop", "window": 3}],
    "downsample": [{"keep": 2}, {"keep": 2, "rest": "renormalise"}],
    "dynamic_sampling": [{}, {"test": "allclose"}],
    "edf": [{}],
    "fifo": [{}],
    "finished_first": [{}],
    "length": [{"min_tokens": 5, "max_tokens": 30}, {"max_tokens": 30, "action": "drop"}],
    "overlong_penalty": [{"max_tokens": 40, "buffer": 20}],
    "replay": [{"selector": "uniform"}, {"selector": "reward_variance", "ratio": 0.7, "pool": 5, "max_uses": 2}],
    "reward_range": [{"low": 0.2, "high": 0.8}],
    "route": [{"low": 0.2}, {"task_types": ["none"]}],
    "staleness": [{}, {"max_staleness": 3, "mode": "wait"}],
    "truncated": [{}, {"action": "drop"}],
}
SHIPPED = [name for name, entry in installed("headrace.operators").items() if entry.value.startswith("headrace.")]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_operator_killed_at_every_record_decides_as_one_that_lives(name: str) -> None:
    for settings in SETTINGS[name]:
        assert_conforms(name, settings, groups=14)


class Passing:
    """The least operator: it passes everything on."""

    kind: ClassVar[Any] = "filter"
    Configuration: ClassVar[type[OperatorConfiguration]] = OperatorConfiguration

    def __init__(self, configuration: OperatorConfiguration) -> None:
        self.seen = 0

    def open(self, context: OperatorContext) -> None: ...

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        context.emit(record)

    def on_timer(self, timer: str, context: OperatorContext) -> None: ...

    def close(self) -> None: ...


class Forgetful(Passing):
    """Counts in memory only."""

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        self.seen += 1
        context.drop("odd", f"{self.seen} seen") if self.seen % 2 else context.emit(record)


class Random(Passing):
    draws: ClassVar[Any] = itertools.count()

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        context.drop("draw", f"number {next(self.draws)}")


class Rewriting(Passing):
    def open(self, context: OperatorContext) -> None:
        context.store().put(b"opened", str(int(context.store().get(b"opened") or 0) + 1).encode())


class Hoarding(Passing):
    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        context.store().put(f"group/{record.group.group}".encode(), bytes(100))
        context.emit(record)


class Nameless(Passing):
    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        context.drop("", "")


class Raising(Passing):
    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        raise ZeroDivisionError("nothing to divide by")


class DroppingShape(Passing):
    kind: ClassVar[Any] = "shape"

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        context.drop("unwanted", "never")


class Miscounting(Passing):
    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        members = tuple(replace(m, shaped_reward=m.shaped_reward + m.replica) for m in record.members)
        context.emit(replace(record, members=members))


CLASSES = {c.__name__: c for c in (
    Passing, Forgetful, Random, Rewriting, Hoarding, Nameless, Raising, DroppingShape, Miscounting,
)}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "broken", "says"),
    [
        ("Passing", set(), ""),
        ("Forgetful", {"restart"}, "gives other records from group"),
        ("Random", {"determinism", "transactions", "restart"}, "gives other records"),
        ("Rewriting", {"state", "restart"}, "open changes the state that it reads"),
        ("Hoarding", {"bounded_state"}, "bytes after 14 groups"),
        ("Nameless", {"reasons"}, "is no 'reason_in_words: numbers'"),
        ("Raising", {"endings"}, "raised ZeroDivisionError: nothing to divide by"),
        ("DroppingShape", {"reasons"}, "admission counts on filters only"),
        ("Miscounting", {"statistics"}, "use with_members"),
    ],
)
def test_a_broken_promise_is_found(name: str, broken: set[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flow", "operator_chain", "prompt_chain", "serving"):
        monkeypatch.setattr(f"headrace.pipeline.{module}.operator_class", lambda entry: CLASSES[entry.type])
    checks = conformance(name, groups=14)
    found = {check.name: check.detail for check in checks if not check.passed}
    assert set(found) == broken
    assert not broken or any(says in detail for detail in found.values()), found
    if broken:
        with pytest.raises(AssertionError, match=f"{name} does not conform"):
            assert_conforms(name, groups=7)


def test_an_unknown_name_and_refused_settings_are_errors_of_configuration() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'dedup'"):
        conformance("dedupe")
    with pytest.raises(ConfigurationError, match="give low, high or both"):
        conformance("reward_range")


@pytest.mark.parametrize(("by", "passed"), [(("batch", "assemble"), True), (("batch", "batch"), False)])
def test_what_assemble_ends_after_batch_did_is_no_second_ending(by: tuple[str, str], passed: bool) -> None:
    """A group that finishes after its last chance has ended as stale."""
    ledger = [Closed(policy=0, group=0, reason="stale", by=name) for name in by]
    driver: Any = SimpleNamespace(dead_letters=[], records=lambda topic: ledger)
    assert serving_conformance._endings_check(driver, 1).passed is passed
