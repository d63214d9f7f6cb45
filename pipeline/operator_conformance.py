"""What every operator must keep, tried on any of them: the same decisions each time, after each restart, with a reason.

In: a name or ``module:Class`` with settings. Out: one ``Check`` for every promise. The operator runs in its place, in
``assemble`` under the TopologyDriver, over closed groups that differ in rewards, lengths, end reasons, repeats and
failed members; decisions are compared as the bytes that would be written to ``groups`` and ``ledger``.

    from headrace.pipeline.operator_conformance import assert_conforms


    def test_my_operator_conforms() -> None:
        assert_conforms("my_package.operator:MyOperator", {"low": 0.2})
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import isclose
from typing import Any

from headrace.connectors import conformance as kits
from headrace.connectors.conformance import Check
from headrace.pipeline import flow, operator_chain, prompt_conformance, serving_conformance
from headrace.pipeline.conformance_feed import ROUND, admission_of, trajectories_of
from headrace.pipeline.conformance_state import state_bytes, state_check, state_of, turns
from headrace.pipeline.operators.operator import mean_and_deviation
from headrace.pipeline.prompt_chain import PROMPT_KINDS
from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.pipeline.serving import SERVING_KINDS
from headrace.schemas.config import RunConfig
from headrace.schemas.records import Closed, Group, Kept, Member

__all__ = ("Check", "assert_conforms", "conformance")

REASON = re.compile(r"[a-z][a-z0-9_]*: .*\S", re.S)
_STATE = b"sstate/operator/"
_TURNS = 8
"""More than records and timers need; an operator that writes whenever it opens never comes to rest."""


def conformance(type_name: str, settings: Mapping[str, Any] | None = None, *, groups: int = 42) -> list[Check]:
    """Try one operator on so many groups; for the promises of one before rollout see ``prompt_conformance``, and of one
    at serving ``serving_conformance``.

    An error in its ``open`` or ``on_timer`` is raised as it is.

    State that depends on a window is judged by its growth from ``groups`` to twice as many: give more groups than the
    window holds. Raises ConfigurationError for an unknown name or settings that the operator refuses.
    """
    config = _config(type_name, settings or {})
    kind: str = operator_chain.operator_class(config.operators[0]).kind
    if kind in SERVING_KINDS:
        return serving_conformance.conformance(type_name, settings or {}, groups=groups)
    flow.validate(config)
    if kind in PROMPT_KINDS:
        return prompt_conformance.prompt_checks(config, groups)
    first = _decided(config, groups)
    return [
        _same("determinism", first, _decided(config, groups), "a second run"),
        _same("transactions", first, _decided(config, groups, together=True), "seven groups in one transaction"),
        _same("restart", first, _decided(config, groups, killed=True), "a kill before and after every commit"),
        state_check(first, "assemble", _STATE),
        _bounded_check(config, groups),
        _ending_check(first, groups),
        _reason_check(first, config),
        _statistics_check(first),
    ]


def assert_conforms(type_name: str, settings: Mapping[str, Any] | None = None, *, groups: int = 42) -> None:
    """``conformance`` for a test: AssertionError with every promise that was not kept."""
    kits.assert_conforms("operators", type_name, settings, groups=groups)


def _config(type_name: str, settings: Mapping[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"id": "conformance", "group_partitions": 1, "inboxes": 1, "lanes": 1},
            "policies": {"main": {"model": "none"}},
            "streams": {"main": {"dataset": "none", "group_size": 4}},
            "operators": [{"type": type_name, **settings}],
        }
    )


def _decided(
    config: RunConfig, groups: int, *, together: bool = False, killed: bool = False, fresh: bool = False
) -> TopologyDriver:
    """A driver that has closed so many groups: record by record, rounds ``together``, or ``killed`` at each commit."""
    driver = TopologyDriver(config, {"assemble": flow.STAGES["assemble"]})
    for first in range(0, groups, ROUND):
        numbers = range(first, min(first + ROUND, groups))
        for group in numbers:
            driver.append("admissions", admission_of(group, fresh=fresh))
        _turns(driver, killed=killed)
        for group in numbers:
            for trajectory in trajectories_of(group, fresh=fresh):
                driver.append("trajectories", trajectory)
                if not together:
                    _turns(driver, killed=killed)
        _turns(driver, killed=killed)
    for _ in range(3):  # timers of the operator
        driver.now_ms += 60_000
        _turns(driver, killed=killed)
    return driver


def _turns(driver: TopologyDriver, *, killed: bool) -> None:
    turns(driver, "assemble", killed=killed, most=_TURNS)


def _values(driver: TopologyDriver) -> list[bytes]:
    return [entry.value for topic in ("groups", "ledger") for entry in driver.log[topic, 0]]


def _state(driver: TopologyDriver) -> dict[bytes, bytes]:
    return state_of(driver, "assemble", _STATE)


def _same(name: str, one: TopologyDriver, other: TopologyDriver, what: str) -> Check:
    left, right = _values(one), _values(other)
    if left == right and _state(one) == _state(other):
        return Check(name, True, f"{what} gives the same {len(left)} records and the same state")
    if left == right:
        return Check(name, False, f"{what} gives the same {len(left)} records, but another state")
    pairs = enumerate(zip(left, right, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
    records = [entry.record for topic in ("groups", "ledger") for entry in one.log[topic, 0]]
    where = f"group {getattr(records[place], 'group', '?')}" if place < len(records) else "the end"
    return Check(name, False, f"{what} gives other records from {where} on ({len(left)} against {len(right)})")


def _bounded_check(config: RunConfig, groups: int) -> Check:
    sizes = [
        state_bytes(_state(_decided(config, n, together=True, fresh=True))) for n in (groups, 2 * groups)
    ]
    told = f"{sizes[0]} bytes after {groups} groups, {sizes[1]} after {2 * groups}"
    return Check("bounded_state", sizes[1] <= 1.1 * sizes[0] + 256, told)


def _ending_check(driver: TopologyDriver, groups: int) -> Check:
    ended = [r for r in driver.records("ledger") if isinstance(r, Kept | Closed)]
    broken = [r for r in ended if isinstance(r, Closed) and r.reason == "failed"]
    if driver.dead_letters:
        return Check("endings", False, f"{len(driver.dead_letters)} records raised: {driver.dead_letters[0][1]}")
    if broken:
        return Check("endings", False, f"group {broken[0].group} and {len(broken) - 1} others: {broken[0].detail}")
    if sorted(r.group for r in ended) != list(range(groups)):
        return Check("endings", False, f"{len(ended)} endings of {groups} groups")
    return Check("endings", True, f"each of {groups} groups ended once")


def _reason_check(driver: TopologyDriver, config: RunConfig) -> Check:
    dropped = [r for r in driver.records("ledger") if isinstance(r, Closed) and r.reason == "filtered"]
    (entry,) = config.operators
    kind = operator_chain.operator_class(entry).kind
    if dropped and kind != "filter":
        told = f"it is of kind {kind} and drops groups ({dropped[0].detail}): admission counts on filters only"
        return Check("reasons", False, told)
    for record in dropped:
        if not REASON.fullmatch(record.detail):
            return Check("reasons", False, f"group {record.group}: {record.detail!r} is no 'reason_in_words: numbers'")
    names = sorted({r.detail.partition(":")[0] for r in dropped})
    return Check("reasons", True, f"{len(dropped)} groups dropped" + (f": {', '.join(names)}" if names else ""))


def _statistics_check(driver: TopologyDriver) -> Check:
    for group, members in _kept(driver):
        counted = [m.shaped_reward for m in members if m.status != "excluded"]
        trained = [m for m in members if m.status == "train"]
        mean, deviation = mean_and_deviation(counted)
        if not trained:
            return Check("statistics", False, f"group {group.group} was kept with no member to train")
        if (group.members, group.counted, group.trained) != (len(members), len(counted), len(trained)):
            return Check("statistics", False, f"group {group.group} has other members than it says; use with_members")
        if not all(map(partial(isclose, abs_tol=1e-12), (group.reward_mean, group.reward_std), (mean, deviation))):
            told = f"group {group.group} says reward {group.reward_mean:g} +- {group.reward_std:g}; use with_members"
            return Check("statistics", False, f"{told}: its members have {mean:g} +- {deviation:g}")
    return Check("statistics", True, "every kept group's are those of its members")


def _kept(driver: TopologyDriver) -> Iterator[tuple[Group, Sequence[Member]]]:
    members: list[Member] = []
    for record in driver.records("groups"):
        if isinstance(record, Member):
            members.append(record)
        elif isinstance(record, Group):
            yield record, members
            members = []
