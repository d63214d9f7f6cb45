"""What every operator at serving must keep, tried in its place: ``batch`` under the TopologyDriver.

In: a name or ``module:Class`` with settings. Out: one ``Check`` for every promise. Groups differ in rewards, tokens,
ages and times of completion; some finish rounds later than they were admitted, some are closed by ``assemble``. A
trainer takes every batch, and the run ends. Half of every batch is replayed, so that used groups are judged too.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from headrace.connectors.conformance import Check
from headrace.pipeline import flow
from headrace.pipeline.conformance_feed import admission_of, trajectories_of
from headrace.pipeline.conformance_state import state_bytes, state_check, state_of, turns
from headrace.pipeline.group_to_batch import Batch
from headrace.pipeline.members import draft_of
from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.schemas.config import RunConfig
from headrace.schemas.parts import Source
from headrace.schemas.records import Batched, Closed, End, Kept, Manifest, Opened, Step

__all__ = ("conformance",)

REASON = re.compile(r"[a-z][a-z0-9_]*: .*\S", re.S)
ROUND = 6
"""Groups of a round; by its end all batches that they make have been trained."""
_POOL_BYTES = 16_384
_STATE = b"s"
_TURNS = 4
"""A turn for the record, one that finds nothing, and two to spare."""
_LATE = 4
"""Every so many groups one finishes a round later."""


def conformance(type_name: str, settings: Mapping[str, Any], *, groups: int = 42) -> list[Check]:
    """Try one serving operator on so many groups. Raises ConfigurationError for settings that it refuses, and
    ``ServingFailed`` when it raises or answers what cannot be.
    """
    config = _config(type_name, settings)
    flow.validate(config)
    first = _served(config, groups)
    return [
        _same("determinism", first, _served(config, groups), "a second run"),
        _same("restart", first, _served(config, groups, killed=True), "a kill before and after every commit"),
        state_check(first, "batch", _STATE),
        _bounded_check(config, groups),
        _endings_check(first, groups),
        _bound_check(first),
        _uses_check(first),
        _reasons_check(first),
    ]


def _config(type_name: str, settings: Mapping[str, Any]) -> RunConfig:
    policy = {"model": "none", "depth": 3, "max_staleness": 4, "mode": "drop", "replay": 0.5}
    return RunConfig.model_validate(
        {
            "run": {"id": "conformance", "group_partitions": 1, "inboxes": 1, "lanes": 2},
            "trainer": {"batch_groups": 4},
            "policies": {"main": policy},
            "streams": {"main": {"dataset": "none", "group_size": 4}},
            "operators": [{"type": type_name, **settings}],
        }
    )


def _served(config: RunConfig, groups: int, *, killed: bool = False) -> TopologyDriver:
    """A driver that has served so many groups, record by record, to the end of the data."""
    driver = TopologyDriver(config, {"batch": flow.STAGES["batch"]})
    late: list[list[Any]] = []
    for first in range(0, groups, ROUND):
        numbers = range(first, min(first + ROUND, groups))
        version = len(_manifests(driver))
        for group in numbers:
            opened = Opened(
                policy=0, group=group, stream="main", prompt_id=f"prompt-{group}", min_version=version, cap=99
            )  # fmt: skip
            _fed(driver, "ledger", opened, killed)
        arriving, late = late, []
        for group in Random(first).sample(numbers, len(numbers)):
            records = list(_kept(group, version, driver.now_ms + group % 5))
            (late if group % _LATE == 3 and group + ROUND < groups else arriving).append(records)
        for records in arriving:
            for topic, record in records:
                _fed(driver, topic, record, killed)
        _train(driver, killed)
        driver.now_ms += 1000
    _fed(driver, "ledger", End(reason="data", policy=0), killed)
    _train(driver, killed)
    return driver


def _kept(group: int, version: int, closed_ms: int) -> Iterator[tuple[str, Any]]:
    """What ``assemble`` writes of a group: kept, or every ninth closed as filtered."""
    if group % 9 == 8:
        yield "ledger", Closed(policy=0, group=group, reason="filtered", by="assemble", operator="some", detail="x: 1")
        return
    reported = {
        t.replica: (t, Source(topic="trajectories", partition=0, offset=at))
        for at, t in enumerate(trajectories_of(group))
    }
    draft = draft_of(0, "main", admission_of(group), reported, {}, closed_ms)
    for member in draft.members:
        yield "groups", replace(member, oldest_version=version, newest_version=version)
    yield "groups", replace(draft.group, oldest_version=version, newest_version=version)
    yield "ledger", Kept(policy=0, group=group)


def _fed(driver: TopologyDriver, topic: str, record: Any, killed: bool) -> None:
    driver.append(topic, record)
    turns(driver, "batch", killed=killed, most=_TURNS)


def _train(driver: TopologyDriver, killed: bool) -> None:
    """Steps for every batch, those included that only they make possible."""
    while (done := sum(isinstance(r, Step) for r in driver.records("steps"))) < len(_manifests(driver)):
        step = Step(
            policy=0, batch=done + 1, version=done + 1, lineage=0, updates=1, loss=0.0, tokens=1, sequences=1,
            wait_seconds=0.0, step_seconds=0.0, publish_seconds=0.0, delta_bytes=0, changed_share=0.0, finished_ms=0,
        )  # fmt: skip
        _fed(driver, "steps", step, killed)


def _manifests(driver: TopologyDriver) -> list[Manifest]:
    return [r for r in driver.records("manifests") if isinstance(r, Manifest)]


def _values(driver: TopologyDriver) -> dict[str, list[bytes]]:
    return {f"{t}[{p}]": [e.value for e in entries] for (t, p), entries in sorted(driver.log.items())}


def _state(driver: TopologyDriver) -> dict[bytes, bytes]:
    return state_of(driver, "batch", _STATE)


def _same(name: str, one: TopologyDriver, other: TopologyDriver, what: str) -> Check:
    left, right = _values(one), _values(other)
    apart = [place for place in {*left, *right} if left.get(place) != right.get(place)]
    if apart:
        return Check(name, False, f"{what} writes other records to {', '.join(sorted(apart))}")
    if _state(one) != _state(other):
        return Check(name, False, f"{what} gives the same batches, but another state")
    return Check(name, True, f"{what} gives the same {len(_manifests(one))} batches and the same state")


def _bounded_check(config: RunConfig, groups: int) -> Check:
    """Twice as many groups take no more state, but for what the pool holds at the end: groups within the bound."""
    sizes = [state_bytes(_state(_served(config, n))) for n in (groups, 2 * groups)]
    told = f"{sizes[0]} bytes after {groups} groups, {sizes[1]} after {2 * groups}"
    return Check("bounded_state", sizes[1] <= sizes[0] + _POOL_BYTES, told)


def _endings_check(driver: TopologyDriver, groups: int) -> Check:
    if driver.dead_letters:
        return Check("endings", False, f"{len(driver.dead_letters)} records raised: {driver.dead_letters[0][1]}")
    ended: Counter[int] = Counter()
    for record in driver.records("ledger"):
        if isinstance(record, Batched):
            ended.update(record.groups)
        elif isinstance(record, Closed) and (record.by == "batch" or not ended[record.group]):
            ended[record.group] += 1  # what assemble ends after batch did counts nowhere
    wrong = [g for g in range(groups) if ended[g] != 1]
    if wrong:
        return Check("endings", False, f"group {wrong[0]} and {len(wrong) - 1} others did not end exactly once")
    closed = sum(isinstance(r, Closed) and r.by == "batch" for r in driver.records("ledger"))
    return Check("endings", True, f"each of {groups} groups ended once, {closed} of them untrained at serving")


def _stage(driver: TopologyDriver) -> Batch:
    """The stage as it is configured, with what the operator itself sets."""
    stage = driver.stage_of("batch")
    assert isinstance(stage, Batch)
    return stage


def _bound_check(driver: TopologyDriver) -> Check:
    bound = _stage(driver).bound
    for manifest in _manifests(driver):
        for member in manifest.members:
            age = manifest.start_version - member.oldest_version
            if age > bound:
                told = f"batch {manifest.batch}: group {member.group}, use {member.use}, is {age} versions old"
                return Check("bound", False, f"{told}; the bound is {bound}")
    return Check("bound", True, f"no item, replayed ones included, is older than {bound} versions")


def _uses_check(driver: TopologyDriver) -> Check:
    """Uses count 0, 1, 2, ..; a group's members share a lane; no more is replayed than the share allows."""
    uses: Counter[tuple[int, int]] = Counter()
    fresh = replayed = 0
    for manifest in _manifests(driver):
        lanes: dict[int, int] = {}
        for member in manifest.members:
            if member.use != uses[member.group, member.replica]:
                return Check("uses", False, f"batch {manifest.batch}: group {member.group} is use {member.use} again")
            uses[member.group, member.replica] += 1
            if lanes.setdefault(member.group, member.lane) != member.lane:
                return Check("uses", False, f"batch {manifest.batch}: group {member.group} lies in two lanes")
        fresh, replayed = fresh + manifest.fresh_groups, replayed + manifest.replayed_groups
    share, size = _stage(driver).settings.replay, _stage(driver).size
    if replayed * (1 - share) > share * (fresh + size) + 1e-9:
        return Check("uses", False, f"{replayed} groups are replayed beside {fresh} fresh ones; the share is {share:g}")
    return Check("uses", True, f"{replayed} replayed uses beside {fresh} fresh ones, each numbered")


def _reasons_check(driver: TopologyDriver) -> Check:
    closed = [r for r in driver.records("ledger") if isinstance(r, Closed) and r.by == "batch"]
    for record in closed:
        if record.reason == "stale" and not REASON.fullmatch(record.detail):
            return Check("reasons", False, f"group {record.group}: {record.detail!r} is no 'reason_in_words: numbers'")
    names = sorted({r.detail.partition(":")[0] for r in closed if r.detail})
    return Check("reasons", True, f"{len(closed)} groups ended untrained" + (f": {', '.join(names)}" if names else ""))
