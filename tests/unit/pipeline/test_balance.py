"""The balance report: every value of AstraFlow's own, trainers that take turns, pools that admission holds back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.balance import (
    HIGH_WAIT,
    LOW_WAIT,
    Balance,
    BalanceReport,
    Zones,
    decide,
    wait_share,
    with_reserve,
)
from headrace.pipeline.run_records import TrajectoryHead
from headrace.schemas.parts import HeldTask, HostedPolicy
from headrace.schemas.records import Batched, Closed, Demand, Kept, Resumed, Step, Stop

ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "astraflow_balance.json").read_text("utf-8"))
BRANCHES = {"scale_up": "grow", "scale_down": "shrink", "hold": "hold"}


def test_every_case_of_the_reference() -> None:
    assert len(ORACLE["cases"]) == 514
    for case in ORACLE["cases"]:
        wait = wait_share(case["wait_sum"], case["step_sum"])
        decision = decide(case["G"], wait, case["entered"], case["consumed"])
        assert f"{wait:.3f}" == case["w_reported"], case
        assert (decision.branch, decision.target) == (BRANCHES[case["branch"]], case["G_target"]), case
        assert decision.target - case["G"] == case["delta"], case


@given(size=st.integers(1, 400), wait=st.floats(0, 0.95), entered=st.integers(0, 10**6), consumed=st.integers(0, 10**6))
def test_the_zones_never_overlap_and_a_pool_never_shrinks_to_nothing(
    size: int, wait: float, entered: int, consumed: int
) -> None:
    decision = decide(size, wait, entered, consumed)
    if wait > HIGH_WAIT:
        assert decision.branch == "grow" and decision.target > size * (1 - 1e-9)
    elif wait >= LOW_WAIT:
        assert (decision.branch, decision.target) == ("hold", size)
    assert decision.target >= 1


def step(policy: int, batch: int, at: float, waited: float) -> Step:
    return Step(
        policy=policy, batch=batch, version=batch, lineage=0, updates=1, loss=0.0, tokens=1, sequences=1,
        wait_seconds=waited, step_seconds=1.0, publish_seconds=0.0, delta_bytes=0, changed_share=0.0,
        finished_ms=round(1000 * at),
    )  # fmt: skip


def demand(worker: str, at: float, held: int, capacity: int = 11, role: str = "any") -> Demand:
    tasks = [HeldTask(kind="train", group=g, replica=0, attempt=0) for g in range(held)]
    return Demand(
        worker=worker, incarnation=1, role=role, capacity=capacity, next_sequence=0, inbox=0,
        sent_ms=round(1000 * at), held=tasks,
    )  # fmt: skip


def head(worker: str, at: float, **over: Any) -> TrajectoryHead:
    fields: dict[str, Any] = {
        "group": 0, "replica": 0, "attempt": 0, "worker": worker, "status": "train", "end_reason": "stop",
        "reward": 0.0, "tokens": 100, "started_ms": 0, "finished_ms": round(1000 * at), "error": "", "prompt_text": "",
        "completion_text": "",
    }  # fmt: skip
    return TrajectoryHead(**{**fields, **over})


def balance_of(records: list[tuple[float, Any]], policies: int = 1, versions: int = 10) -> Balance:
    balance = Balance([f"p{i}" for i in range(policies)], versions)
    for at, record in sorted(records, key=lambda r: r[0]):
        balance.fold(record, round(1000 * at))
    return balance


def report_of(records: list[tuple[float, Any]], policies: int = 1, versions: int = 10) -> BalanceReport:
    report = balance_of(records, policies, versions).report()
    assert report is not None
    return report


def steps(policy: int, count: int, every: float, waited: float, start: float = 0.0) -> list[tuple[float, Any]]:
    return [(start + n * every, step(policy, n + 1, start + n * every, waited)) for n in range(count)]


def test_nothing_is_reported_before_a_policy_has_two_steps() -> None:
    assert balance_of(steps(0, 1, 10, 1)).report() is None


def test_two_trainers_that_wait_a_tenth_each_are_no_reason_to_grow() -> None:
    records = [*steps(0, 11, 10, 1.0), *steps(1, 11, 10, 1.0, start=5.0)]
    records += [(t, demand("w", t, 10)) for t in range(0, 106, 5)]
    report = report_of(records, policies=2)
    assert report.wait_share == pytest.approx(0.10)
    assert [row.wait_share for row in report.policies] == pytest.approx([0.10, 0.10])
    assert report.branch == "hold"


def test_the_policy_that_waits_most_decides_and_a_stopped_one_does_not_count() -> None:
    records = [*steps(0, 11, 10, 0.0), *steps(1, 11, 10, 5.0), (0.0, demand("w", 0, 5))]
    records += [(t, demand("w", t, 10)) for t in range(0, 101, 5)]
    assert report_of(records, policies=2).branch == "grow"
    assert report_of(records, policies=2).target == 2
    over = report_of([*records, (101.0, Stop(reason="steps", policy=1))], policies=2)
    assert [row.policy for row in over.policies] == ["p0"]


def test_a_pool_that_admission_holds_back_shrinks_by_its_idle_slots() -> None:
    """Four workers, half of whose slots are idle; as many groups enter as are consumed."""
    records = steps(0, 11, 10, 0.0)
    records += [(t, demand(f"w{n}", t, 5)) for n in range(4) for t in range(0, 101, 5)]
    for n in range(1, 11):
        records += [(10 * n - 5, Kept(policy=0, group=g)) for g in range(8)]
        records += [(10 * n - 4, Batched(policy=0, batch=n, groups=list(range(8))))]
    records += [(t, demand("judge", t, 10, role="eval")) for t in range(0, 101, 5)]
    report = report_of(records)
    assert [row.worker for row in report.workers] == [f"w{n}" for n in range(4)], "who only evaluates does not count"
    assert report.busy_share == pytest.approx(0.5)
    assert (report.entered, report.consumed) == (pytest.approx(160), 80)
    assert (report.branch, report.target) == ("shrink", 3)


def test_workers_are_told_apart_by_what_they_made_and_whether_they_are_heard() -> None:
    records = steps(0, 11, 10, 0.0)
    records += [(t, demand("fast", t, 10)) for t in range(0, 101, 5)]
    records += [(t, demand("silent", t, 10)) for t in range(0, 61, 5)]
    records += [(50.0, demand("left", 50, 0)), (55.0, demand("left", 55, 0, capacity=0))]
    paused = replace(demand("paused", 100, 0, capacity=0), policies=[HostedPolicy(policy=0, version=1)])
    records.append((100.0, paused))
    records += [(t, head("fast", t)) for t in range(1, 101)]
    records += [(t, head("silent", t, status="excluded", tokens=0)) for t in range(1, 61)]
    report = report_of(records)
    by_name = {row.worker: row for row in report.workers}
    assert {n: row.status for n, row in by_name.items()} == {
        "fast": "healthy", "left": "gone", "paused": "suspended", "silent": "silent"
    }  # fmt: skip
    assert (by_name["fast"].trajectories, by_name["fast"].usable) == (100, 100)
    assert by_name["fast"].tokens_per_second == pytest.approx(100, rel=0.02)
    assert (by_name["silent"].trajectories, by_name["silent"].usable) == (60, 0)
    assert report.size == 1 and by_name["fast"].busy == pytest.approx(1.0)


def test_only_the_window_counts() -> None:
    records = [*steps(0, 30, 10, 5.0), *steps(0, 11, 10, 0.0, start=300.0)]
    records += [(t, Closed(policy=0, group=1, reason="filtered", by="assemble")) for t in range(0, 400, 10)]
    records += [(t, demand("w", t, 10)) for t in range(0, 401, 5)]
    report = report_of(records)
    assert report.wait_share == 0.0 and report.since_ms == 300_000
    assert report.policies[0].filtered == 10


def test_the_time_of_a_restart_is_no_step() -> None:
    records = [*steps(0, 5, 10, 0.0), (500.0, Resumed(policy=0, lineage=1, batch=4, version=6))]
    records += [(t, demand("w", t, 1)) for t in range(0, 561, 5)]
    assert balance_of(records).report() is None
    records += steps(0, 4, 10, 4.0, start=520.0)
    assert report_of(records).policies[0].step_seconds == pytest.approx(10)


def test_zones_can_be_moved() -> None:
    eager = Zones(grow_above=0.02, shrink_below=0.01, margin=1.5)
    assert decide(10, 0.05, 10, 10).branch == "hold"
    assert decide(10, 0.05, 10, 10, eager).branch == "grow"
    assert decide(10, 0.0, 30, 10, eager).target == 5


def test_filling_the_stock_is_no_reason_to_shrink() -> None:
    """A busy pool whose kept groups pile up ahead of the trainer, as they do after a wait, is not too large."""
    records = steps(0, 11, 10, 0.0)
    records += [(t, demand(f"w{n}", t, 10)) for n in range(4) for t in range(0, 101, 5)]
    for n in range(1, 11):
        records += [(10 * n - 5, Kept(policy=0, group=g)) for g in range(16)]
        records += [(10 * n - 4, Batched(policy=0, batch=n, groups=list(range(8))))]
    assert report_of(records).target == 4


def test_work_that_is_thrown_away_as_stale_is() -> None:
    records = steps(0, 11, 10, 0.0)
    records += [(t, demand(f"w{n}", t, 10)) for n in range(4) for t in range(0, 101, 5)]
    for n in range(1, 11):
        records += [(10 * n - 4, Batched(policy=0, batch=n, groups=list(range(8))))]
        records += [(10 * n - 3, Closed(policy=0, group=g, reason="stale", by="batch")) for g in range(8)]
    assert (report_of(records).branch, report_of(records).target) == ("shrink", 3)


def test_a_pool_without_reserve_grows_before_anybody_waits_if_told_to() -> None:
    reserve = Zones(busy_above=0.95)
    held = decide(10, 0.0, 100, 100)
    assert with_reserve(held, 10, 0.97, Zones()) == held
    assert with_reserve(held, 10, 0.94, reserve) == held
    assert with_reserve(held, 10, 0.97, reserve).branch == "grow"
    assert [with_reserve(held, n, 1.0, reserve).target for n in (1, 10, 20)] == [2, 11, 22]
    grown = decide(10, 0.5, 100, 100)
    assert with_reserve(grown, 10, 1.0, reserve) == grown


def test_who_is_alive_is_known_without_a_step() -> None:
    balance = balance_of([(0, demand("a", 0, 1)), (3, demand("b", 3, 0)), (4, demand("c", 4, 0, capacity=0))])
    assert balance.report() is None
    assert [balance.living(now) for now in (5_000, 10_000, 10_001, 13_000, 13_001)] == [2, 2, 1, 1, 0]
