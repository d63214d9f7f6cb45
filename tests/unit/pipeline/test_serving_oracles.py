"""Serving beside what other systems' own code did: AstraFlow's queue and replay pool, ROLL's buffers.

``tests/oracles/astraflow_buffer.json`` holds every decision of AstraFlow's fresh queue and replay pool,
``roll_replay_buffer.json`` and ``roll_group_queue.json`` those of ROLL's. Where headrace chooses otherwise, a test
here says how: replayed groups are within the bound, a share of 1 is refused, version 0 is a version, nothing is
evicted, and an unfinished group holds nobody up.
"""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from serving_feed import ServingFeed, make_candidate, make_moment
from stage_feed import make_admission, make_config, make_sequence, make_trajectory

from headrace.pipeline import flow
from headrace.pipeline.credits import fresh_groups
from headrace.pipeline.members import draft_of
from headrace.pipeline.operators.edf import EarliestDeadline
from headrace.pipeline.operators.fifo import AdmissionOrder
from headrace.pipeline.operators.finished_first import FinishedFirst
from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.replay import Replay, ReplayConfiguration
from headrace.pipeline.operators.serving import Candidate
from headrace.pipeline.operators.staleness import Staleness, StalenessConfiguration
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Source

FOLDER = Path(__file__).parents[2] / "oracles"
ASTRAFLOW = json.loads((FOLDER / "astraflow_buffer.json").read_text())
ROLL = json.loads((FOLDER / "roll_replay_buffer.json").read_text())
QUEUE = json.loads((FOLDER / "roll_group_queue.json").read_text())
ORDERS: dict[str, list[Any]] = {"edf": [EarliestDeadline], "fifo": [FinishedFirst, AdmissionOrder]}
"""Their order to ours; arrivals are numbered in order, so both of ours are their ``fifo``."""


def arrivals(versions: list[int | None]) -> list[Candidate]:
    """Groups that arrive one after the other; one without a version has -1, which is older than all."""
    return [
        make_candidate(n, oldest_version=-1 if version is None else version, closed_ms=n)
        for n, version in enumerate(versions)
    ]


def queue(order: type[Any], case: dict[str, Any]) -> dict[str, Any]:
    """Their queue with our order and rule: an arrival at a full queue evicts its head, stale heads are skipped."""
    given, rule = order(OperatorConfiguration()), Staleness(StalenessConfiguration())
    bound = case["max_staleness"] if case["max_staleness"] is not None else 1 << 30
    moment = make_moment(start=case["current"], bound=bound)
    held: list[Candidate] = []
    evicted = 0

    def by_rank(candidate: Candidate) -> Any:
        return given.rank(candidate, moment), candidate.group.group

    for candidate in arrivals(case["min_versions"]):
        if len(held) >= case["capacity"]:
            held.remove(min(held, key=by_rank))
            evicted += 1
        held.append(candidate)
    served: list[int] = []
    skipped = [0]
    for candidate in sorted(held, key=by_rank):
        if candidate.group.oldest_version >= 0 and rule.refusal(candidate, moment):
            skipped.append(skipped[-1] + 1)
            continue
        served.append(candidate.group.group)
        skipped.append(skipped[-1])
        counted = skipped[-1]
    return {"served": served, "evicted": evicted, "skipped": counted if served else 0}


@pytest.mark.parametrize("number", range(len(ASTRAFLOW["queue"])))
def test_the_orders_serve_what_astraflows_queue_served(number: int) -> None:
    case = ASTRAFLOW["queue"][number]
    for order in ORDERS[case["order"]]:
        found = queue(order, case)
        assert found["served"] == case["served"]
        assert found["evicted"] == case["put"]["evicted"]
        assert len(found["served"]) == case["stats"]["consumed"]
        assert found["skipped"] == case["stats"]["skipped_stale"]


@pytest.mark.parametrize(("order", "served"), [("fifo", [0, 1, 2, 3, 4, 6]), ("edf", [4, 1, 3, 2, 6, 0])])
def test_worked_orders(order: str, served: list[int]) -> None:
    case = {"min_versions": [7, 3, 5, 3, None, 1, 6], "current": 7, "max_staleness": 4, "capacity": 99}
    assert all(queue(o, case)["served"] == served for o in ORDERS[order])


@pytest.mark.parametrize(("order", "left"), [("fifo", {1, 2, 3}), ("edf", {2, 0, 3})])
def test_worked_overflow_which_headrace_does_not_have(order: str, left: set[int]) -> None:
    case = {"min_versions": [5, 3, 4, 6], "current": 0, "max_staleness": None, "capacity": 3}
    assert all(set(queue(o, case)["served"]) == left for o in ORDERS[order])
    feed = ServingFeed({"type": "edf" if order == "edf" else "finished_first"}, depth=9, size=5)
    feed.open(range(4))
    for group, version in enumerate([5, 3, 4, 6]):
        feed.keep(group, version)
    assert feed.closed() == [], "admission bounds what is kept, so nothing is evicted"


def replayed(case: dict[str, Any], steps: int) -> list[list[int]]:
    """Their assembly of batches with our selector: int(N r) from the pool, fresh ones for the rest, fresh first."""
    chooser = Replay(ReplayConfiguration(selector="latest"))
    queue_of_fresh, pool, batches = itertools.count(), list[Candidate](), []
    entered = itertools.count(1)
    for step in range(steps):
        count = min(int(case["batch"] * case["ratio"]), len(pool))
        chosen = list(chooser.choose(pool, count, make_moment(step))) if count else []
        fresh = list(itertools.islice(queue_of_fresh, case["batch"] - len(chosen)))
        batches.append(fresh + chosen)
        pool = [*pool, *(make_candidate(n, entered=next(entered)) for n in fresh)][-case["replay_cap"] :]
    return batches


@pytest.mark.parametrize("number", range(len(ASTRAFLOW["replay"])))
def test_latest_replays_what_astraflow_replayed(number: int) -> None:
    case = ASTRAFLOW["replay"][number]
    assert replayed(case, len(case["batches"])) == case["batches"]


@pytest.mark.parametrize(
    ("ratio", "batches"),
    [
        (0.3, [[*range(10)], [*range(10, 17), 7, 8, 9], [*range(17, 24), 14, 15, 16], [*range(24, 31), 21, 22, 23]]),
        (0.7, [[*range(10)], [10, 11, 12, *range(3, 10)], [13, 14, 15, *range(6, 13)], [16, 17, 18, *range(9, 16)]]),
        (0.29, [[*range(10)], [*range(10, 18), 8, 9], [*range(18, 26), 16, 17], [*range(26, 34), 24, 25]]),
    ],
)
def test_worked_replay(ratio: float, batches: list[list[int]]) -> None:
    assert replayed({"batch": 10, "ratio": ratio, "replay_cap": 10_000}, 4) == batches


def test_worked_small_pool() -> None:
    pool = [make_candidate(n, entered=n) for n in range(5)][-3:]
    assert list(Replay(ReplayConfiguration()).choose(pool, 4, make_moment())) == [2, 3, 4]


@pytest.mark.parametrize(
    ("groups", "share", "theirs"),
    [(256, 0.3, 76), (256, 0.5, 128), (256, 0.7, 179), (100, 0.29, 28), (10, 0.7, 7), (3, 0.5, 1)],
)
def test_the_share_is_exact_where_theirs_is_cut_off(groups: int, share: float, theirs: int) -> None:
    assert int(groups * share) == theirs
    fresh, exact = fresh_groups(groups, share), Fraction(repr(share))
    feed = ServingFeed(size=groups, replay=share)
    stage: Any = feed.driver.stage_of("batch")
    due = stage.replayed_a_batch
    assert due / (due + fresh) == exact, "of all that is trained exactly this share is replayed"
    assert abs(due + fresh - groups) < 1 / (1 - exact), "and a batch has its size, but for the rounding of fresh ones"


def test_a_batch_has_its_fresh_groups_from_the_start() -> None:
    """Theirs fills up a batch with fresh samples while the pool is short; here the fresh part of a batch is fixed, so
    that admission knows it (protocol 4), and the share is made up by later batches."""
    feed = ServingFeed({"type": "replay", "selector": "latest"}, size=10, replay=0.3, depth=3)
    feed.open(range(14))
    for group in range(14):
        feed.keep(group, settle=False)
    feed.driver.settle()
    assert feed.fresh() == [[*range(7)], [*range(7, 14)]]
    assert feed.replayed() == [[], [3, 4, 5, 6]]


def test_a_share_of_1_is_refused_where_theirs_takes_nothing_fresh_any_more() -> None:
    assert replayed({"batch": 10, "ratio": 1.0, "replay_cap": 10_000}, 4) == [[*range(10)]] * 4
    with pytest.raises(ConfigurationError, match="ratio is below 1"):
        flow.validate(make_config(operators=[{"type": "replay", "ratio": 1.0}]))


@pytest.mark.parametrize(("versions", "theirs", "ours"), [((0, 5), 5, 0), ((0, 0), 0, 0), ((3, 5), 3, 3)])
def test_version_0_is_a_version_where_theirs_overlooks_it(versions: tuple[int, int], theirs: int, ours: int) -> None:
    assert min((v for v in versions if v > 0), default=0) == theirs
    results = {
        replica: (make_trajectory(0, replica, sequences=[make_sequence(0, *versions, tokens=3)]), Source(
            topic="trajectories", partition=0, offset=replica))
        for replica in range(2)
    }  # fmt: skip
    assert draft_of(0, "main", make_admission(0), results, {}, 0).group.oldest_version == ours


def buffer_of(scenario: dict[str, Any], order: str) -> list[dict[str, Any]]:
    """ROLL's scenario on ``batch``: each step admits as many as ROLL did, all finish at once but the slow ones."""
    params = scenario["params"]
    size, alpha, slow = params["B"], params["alpha"], {int(k): v for k, v in params.get("slow", {}).items()}
    extra = params.get("additional", size) - size
    feed = ServingFeed(
        {"type": order}, size=size, depth=alpha, max_staleness=math.ceil(alpha), extra_groups=extra, ahead=0
    )
    stage: Any = feed.driver.stage_of("batch")
    numbers, late, log = itertools.count(), dict[int, int](), []
    for step, seen in enumerate(scenario["log"]):
        for group in [g for g in late if slow[g] <= step]:
            feed.keep(group, late.pop(group))
        admitted = list(itertools.islice(numbers, seen["admitted"]))
        feed.open(admitted, step)
        for group in admitted:
            if slow.get(group, 0) > step:
                late[group] = step
            else:
                feed.keep(group, step, settle=False)
        feed.driver.settle()
        blocked = len(feed.manifests()) <= step
        if blocked:
            for group in list(late):
                feed.keep(group, late.pop(group))
        manifest = feed.manifests()[step]
        versions = {m.group: m.oldest_version for m in manifest.members}
        stage = feed.driver.stage_of("batch")
        left = {
            str(v): [list(stage.held.open.values()).count(v), list(stage.held.kept.values()).count(v)]
            for v in sorted({*stage.held.open.values(), *stage.held.kept.values()})
            if v > step - math.ceil(alpha)
        }
        ages = sorted(versions.values())
        log.append({"blocked_on_straggler": blocked, "groups_left": left,
                    "consumed_start_steps": {str(v): ages.count(v) for v in sorted(set(ages))}})  # fmt: skip
        feed.step()
    return log


@pytest.mark.parametrize("order", ["edf", "fifo"])
@pytest.mark.parametrize("scenario", ROLL["scenarios"], ids=lambda s: s["name"])
def test_batches_are_of_the_ages_that_rolls_buffer_served(scenario: dict[str, Any], order: str) -> None:
    found = buffer_of(scenario, order)
    wanted = [{key: entry[key] for key in found[0]} for entry in scenario["log"]]
    if scenario["params"]["alpha"] < 1 or scenario["params"].get("additional"):
        for entry in (*found, *wanted):  # they abort extra prompts at once, here they close when the next batch is made
            entry.pop("groups_left")
    assert found == wanted


def test_an_unfinished_group_holds_nobody_up_where_rolls_queue_waits_for_it() -> None:
    log = {entry[0]: entry[1:] for entry in QUEUE["log"]}
    assert log["episodes 1,2 complete, 0 not: get() returned?"] == ["False"]
    feed = ServingFeed({"type": "fifo"}, depth=2)
    feed.open(range(3))
    feed.keep(1)
    feed.keep(2)
    assert feed.batches() == [[1, 2]]


def test_a_late_result_is_counted_and_fractional_depths_work_where_theirs_do_not() -> None:
    log = {entry[0]: entry[1:] for entry in QUEUE["log"]}
    assert "TypeError" in log["alpha=0.5"][0] and "TypeError" in log["alpha=1.0 (float)"][0]
    assert log["after advance_step(2): episode 1 (created at 0) expired"] == ["{2: 1, 3: 2}"]
    feed = ServingFeed(depth=0.5, max_staleness=1, mode="drop")
    feed.open(range(5))
    for group in range(4):
        feed.keep(group)
    feed.step()
    assert [(c.group, c.reason) for c in feed.closed()] == [(4, "stale")], "it could not make batch 2, its last"
    feed.keep(4)
    assert feed.driver.metrics.total("dropped_total") == 3, "its members and its Group: named, not silent"
