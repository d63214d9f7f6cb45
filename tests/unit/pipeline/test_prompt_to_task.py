"""``schedule`` on the driver: admission, dispatch, leases, cancels, evaluation, ends (protocol 3, 5, 9)."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from stage_feed import (
    group_place,
    inbox,
    make_config,
    make_demand,
    make_driver,
    make_prompt,
    make_step,
    of_type,
)

from headrace.pipeline.admission import PAUSE_ABOVE, RESUME_BELOW
from headrace.pipeline.prompt_to_task import Schedule
from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.schemas.config import RunConfig
from headrace.schemas.parts import Source
from headrace.schemas.records import (
    Admission,
    Batched,
    Cancel,
    Closed,
    End,
    Failed,
    Kept,
    NeedsScore,
    Opened,
    Resumed,
    RunEnd,
    Stop,
    Task,
    Trained,
)


def fed(config: RunConfig | None = None, prompts: int = 0, *, end: bool = False) -> TopologyDriver:
    """A driver of ``schedule`` with prompts in its topic."""
    driver = make_driver(config or make_config(), "schedule")
    for number in range(prompts):
        driver.append("prompts", make_prompt(number))
    if end:
        driver.append("prompts", End(reason="epochs", stream="main"))
    return driver


def demand(driver: TopologyDriver, worker: str = "w0", **more: Any) -> None:
    driver.append("demand", make_demand(worker, **more))
    driver.settle()


def tasks(driver: TopologyDriver, kind: str = "train") -> list[Task]:
    return [t for t in of_type(driver, "tasks", Task) if t.kind == kind]


def closed(group: int, reason: str = "filtered", policy: int = 0, by: str = "assemble") -> Closed:
    return Closed(policy=policy, group=group, reason=reason, by=by)


def schedule(driver: TopologyDriver) -> Schedule:
    stage = driver.stage_of("schedule")
    assert isinstance(stage, Schedule)
    return stage


def two(**more: Any) -> RunConfig:
    return make_config(policies={"a": {"model": "none", "depth": 0}, "b": {"model": "none", "depth": 1}}, **more)


def test_nothing_is_admitted_before_a_worker_has_room() -> None:
    driver = fed(prompts=5)
    driver.settle()
    assert driver.records("admissions") == []
    demand(driver, capacity=0)
    assert driver.records("admissions") == []
    demand(driver, capacity=1)
    assert [a.group for a in of_type(driver, "admissions", Admission)] == [0]
    assert [(t.group, t.replica) for t in tasks(driver)] == [(0, 0)]


def test_admission_opened_and_first_task_are_one_transaction_and_say_the_same() -> None:
    config = make_config(parts=3, policies={"main": {"model": "none", "depth": 2, "lag": 1}})
    driver = fed(config, prompts=3)
    demand(driver, capacity=1)
    (admission,) = of_type(driver, "admissions", Admission)
    (opened,) = of_type(driver, "ledger", Opened)
    (task,) = tasks(driver)
    assert driver.log["admissions", group_place(config, 0)][0].record == admission
    assert driver.log["tasks", inbox(config, "w0")][0].record == task
    assert opened.cap == admission.policies[0].cap == 6
    assert admission.deadline_ms == driver.now_ms + config.group_deadline_ms()
    assert admission.sources == opened.sources == task.sources == [Source(topic="prompts", partition=0, offset=0)]
    assert (task.worker, task.incarnation, task.sequence, task.workflow) == ("w0", 1, 0, "single_turn")


def test_replicas_of_the_oldest_group_go_out_before_another_group_opens() -> None:
    driver = fed(prompts=3)
    demand(driver, capacity=3)
    assert [(t.group, t.replica) for t in tasks(driver)] == [(0, 0), (0, 1), (1, 0)]


def test_admission_stops_at_the_target_and_goes_on_when_credits_end() -> None:
    driver = fed(make_config(policies={"main": {"model": "none", "depth": 0}}), prompts=9)
    demand(driver, capacity=99)
    assert len(of_type(driver, "ledger", Opened)) == 2
    driver.append("ledger", closed(0))
    driver.settle()
    assert [o.group for o in of_type(driver, "ledger", Opened)] == [0, 1, 2]
    for group in (1, 2):
        driver.append("ledger", Kept(policy=0, group=group))
    driver.append("ledger", Batched(policy=0, batch=1, groups=[1, 2]))
    driver.settle()
    assert len(of_type(driver, "ledger", Opened)) == 3, "batched and untrained groups count"
    driver.append("steps", make_step(1))
    driver.settle()
    assert [(o.group, o.min_version) for o in of_type(driver, "ledger", Opened)][3:] == [(3, 1), (4, 1)]


def test_a_step_writes_trained_and_only_the_first_for_a_batch_says_first() -> None:
    driver = fed()
    driver.append("steps", make_step(1))
    driver.append("steps", Resumed(policy=0, lineage=1, batch=0, version=2))
    driver.append("steps", make_step(1, version=3))
    driver.settle()
    trained = [(t.batch, t.version, t.first) for t in of_type(driver, "ledger", Trained)]
    assert trained == [(1, 1, True), (0, 2, False), (1, 3, False)]


def test_lag_never_reaches_below_the_last_resumed() -> None:
    config = make_config(policies={"main": {"model": "none", "lag": 3}})
    driver = fed(config, prompts=9)
    driver.append("steps", make_step(1, version=4))
    demand(driver, capacity=1, versions={0: 4})
    driver.append("steps", Resumed(policy=0, lineage=1, batch=1, version=5))
    driver.settle()
    demand(driver, capacity=4, read=1, versions={0: 5})
    assert [o.min_version for o in of_type(driver, "ledger", Opened)][:1] == [1]
    assert {o.min_version for o in of_type(driver, "ledger", Opened)[1:]} == {5}


def test_dispatch_waits_until_demand_has_been_read_to_its_end() -> None:
    driver = fed(prompts=3)
    driver.append("demand", make_demand("w0"))
    driver.append("demand", make_demand("w1"))
    driver.turn("schedule", read=lambda place, waiting: min(waiting, 1) if place[0] == "demand" else waiting)
    assert driver.records("tasks") == []
    driver.settle()
    assert {t.worker for t in tasks(driver)} == {"w0", "w1"}


def test_a_silent_worker_loses_its_tasks_to_another_after_the_lease_and_not_before() -> None:
    driver = fed(prompts=1)
    demand(driver, "w0", capacity=2)
    demand(driver, "w1", capacity=9)
    driver.now_ms += 9000
    demand(driver, "w1", capacity=9)
    driver.advance(1000)
    assert len(tasks(driver)) == 2
    driver.advance(1)
    again = tasks(driver)[2:]
    assert [(t.worker, t.attempt) for t in again] == [("w1", 1), ("w1", 1)]


def test_silence_is_not_judged_while_demand_waits_to_be_read() -> None:
    driver = fed(prompts=1)
    demand(driver, "w0", capacity=2)
    demand(driver, "w1", capacity=9)
    driver.now_ms += 20_000
    driver.append("demand", make_demand("w0", capacity=2, read=2, held=tasks(driver)))
    driver.append("demand", make_demand("w1", capacity=9))
    driver.turn("schedule", read=lambda place, waiting: 0)
    driver.settle()
    assert len(tasks(driver)) == 2


def test_time_without_a_broker_is_no_silence() -> None:
    driver = fed(prompts=1)
    demand(driver, "w0", capacity=2)
    demand(driver, "w1", capacity=9)
    driver.now_ms += 30_000
    driver.reachable_since_ms = driver.now_ms
    driver.settle()
    assert len(tasks(driver)) == 2
    driver.advance(9_900)
    assert len(tasks(driver)) == 2


def test_a_new_incarnation_gets_the_tasks_at_once_as_the_next_attempt() -> None:
    driver = fed(prompts=1)
    demand(driver, capacity=2)
    demand(driver, incarnation=2, capacity=2)
    assert [(t.incarnation, t.attempt, t.sequence) for t in tasks(driver)] == [
        (1, 0, 0), (1, 0, 1), (2, 1, 0), (2, 1, 1),
    ]  # fmt: skip


def test_a_suspended_worker_gives_its_tasks_to_others_with_their_prefixes_and_gets_new_ones_when_it_goes_on() -> None:
    driver = fed(prompts=3)
    demand(driver, capacity=3)
    given = tasks(driver)
    assert [t.sequence for t in given] == [0, 1, 2]
    # it has read two of three when it obeys: tells of a prefix, then is another incarnation that takes nothing
    prefix = {(given[0].group, given[0].replica): 41}
    demand(driver, capacity=0, read=2, held=given[:2], partials=prefix)
    demand(driver, incarnation=2, capacity=0, read=2)
    assert tasks(driver) == given
    demand(driver, "w1", capacity=3)
    again = tasks(driver)[3:]
    assert {(t.group, t.replica, t.attempt, t.worker) for t in again} == {(t.group, t.replica, 1, "w1") for t in given}
    assert {(t.group, t.replica): t.partial for t in again if t.partial >= 0} == prefix
    demand(driver, incarnation=2, capacity=2, read=2)
    assert [(t.worker, t.incarnation, t.sequence, t.attempt) for t in tasks(driver)[6:]] == [
        ("w0", 2, 2, 0), ("w0", 2, 3, 0),
    ]  # fmt: skip


def test_a_passed_deadline_is_another_attempt_and_the_third_failure_is_told_to_assemble() -> None:
    config = make_config(rollout={"task_deadline_seconds": 5, "lease_seconds": 1000}, group_size=1)
    driver = fed(config, prompts=1)
    demand(driver)
    for attempt in range(3):
        driver.advance(6900)
        assert len(tasks(driver)) == attempt + 1
        driver.advance(200)
        demand(driver, read=attempt + 1, held=[tasks(driver)[attempt]])
    assert [t.attempt for t in tasks(driver)] == [0, 1, 2]
    (failed,) = of_type(driver, "admissions", Failed)
    assert (failed.kind, failed.group, failed.replica, failed.attempts, failed.lost_leases) == ("train", 0, 0, 3, 0)
    assert "3 deadlines passed" in failed.reason


def test_five_lost_leases_are_told_to_assemble() -> None:
    driver = fed(make_config(group_size=1), prompts=1)
    for incarnation in range(1, 7):
        demand(driver, incarnation=incarnation, capacity=1)
    assert [t.attempt for t in tasks(driver)] == [0, 1, 2, 3, 4]
    (failed,) = of_type(driver, "admissions", Failed)
    assert failed.lost_leases == 5


def test_a_reported_result_ends_the_lease_whatever_it_says() -> None:
    driver = fed(make_config(group_size=1), prompts=1)
    demand(driver, capacity=1)
    demand(driver, capacity=1, read=1)
    driver.advance(300_000)
    assert len(tasks(driver)) == 1


def test_holders_of_a_settled_group_get_a_cancel_and_waiting_replicas_never_go_out() -> None:
    config = make_config(group_size=4)
    driver = fed(config, prompts=1)
    demand(driver, "w0", capacity=2)
    driver.append("ledger", Kept(policy=0, group=0))
    driver.append("ledger", Batched(policy=0, batch=1, groups=[0]))
    driver.settle()
    cancels = [(c.worker, c.group, c.replica, c.attempt) for c in of_type(driver, "tasks", Cancel)]
    assert cancels == [("w0", 0, 0, 0), ("w0", 0, 1, 0)]
    demand(driver, "w1", capacity=9)
    assert len(tasks(driver)) == 2


def test_a_failed_group_is_admitted_once_more_behind_what_waits_then_lost_by_name() -> None:
    driver = fed(make_config(group_size=1), prompts=3)
    demand(driver, capacity=1)
    driver.append("ledger", closed(0, "failed"))
    driver.settle()
    for read in range(1, 5):
        demand(driver, capacity=1, read=read)
    admitted = [(a.prompt_id, a.retry) for a in of_type(driver, "admissions", Admission)]
    assert admitted == [("main-0", 0), ("main-1", 0), ("main-2", 0), ("main-0", 1)]
    driver.append("ledger", closed(3, "failed"))
    driver.settle()
    demand(driver, capacity=1, read=5)
    assert len(of_type(driver, "admissions", Admission)) == 4
    assert driver.metrics.counters["dropped_total", (("reason", "prompt_lost"), ("topic", "prompts"))] == 1


def test_a_group_that_failed_for_one_policy_is_retried_for_it_alone_and_at_once() -> None:
    driver = fed(two(group_size=1), prompts=1, end=True)
    demand(driver, capacity=1, versions={0: 0, 1: 0})
    driver.append("ledger", closed(0, "failed", policy=1), partition=1)
    driver.settle()
    demand(driver, capacity=0, read=1, versions={0: 0, 1: 0})
    assert len(of_type(driver, "admissions", Admission)) == 1, "policy 0 waits for the group"
    driver.append("ledger", Kept(policy=0, group=0), partition=0)
    driver.settle()
    assert not of_type(driver, "ledger", End)
    demand(driver, capacity=2, read=1, versions={0: 0, 1: 0})
    retry = of_type(driver, "admissions", Admission)[1]
    assert ([p.policy for p in retry.policies], retry.retry, retry.prompt_id) == ([1], 1, "main-0")
    assert len(of_type(driver, "ledger", End)) == 2, "the kept group may wait for this End"


def test_filtered_and_stale_groups_are_not_admitted_again() -> None:
    driver = fed(prompts=2)
    demand(driver, capacity=9)
    driver.append("ledger", closed(0, "filtered"))
    driver.append("ledger", closed(1, "stale", by="batch"))
    driver.settle()
    demand(driver, capacity=9, read=4)
    assert len(of_type(driver, "admissions", Admission)) == 2


def test_pacing_any_opens_credits_only_for_policies_with_room() -> None:
    driver = fed(two(), prompts=9)
    demand(driver, capacity=99, versions={0: 0, 1: 0})
    opened = [(o.group, o.policy) for o in of_type(driver, "ledger", Opened)]
    assert opened == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (3, 1)]
    assert [[p.policy for p in a.policies] for a in of_type(driver, "admissions", Admission)] == [
        [0, 1], [0, 1], [1], [1],
    ]  # fmt: skip
    assert {b.policy for t in tasks(driver) for b in t.policies} == {0, 1}, "the workflow needs both"
    assert driver.metrics.total("unclaimed") == 2


def test_pacing_all_and_by_name_wait_for_the_slower_policy() -> None:
    for pacing, groups in (("all", 2), ("a", 2), ("b", 4)):
        driver = fed(two(pacing=pacing), prompts=9)
        demand(driver, capacity=99, versions={0: 0, 1: 0})
        assert len(of_type(driver, "admissions", Admission)) == groups, pacing


def test_a_stopped_policy_gets_nothing_and_stops_nobody() -> None:
    driver = fed(two(pacing="all"), prompts=9)
    driver.append("steps", Stop(reason="steps", policy=0), partition=0)
    demand(driver, capacity=99, versions={0: 0, 1: 0})
    assert {o.policy for o in of_type(driver, "ledger", Opened)} == {1}
    assert len(of_type(driver, "ledger", Opened)) == 4
    assert [e.policy for e in of_type(driver, "ledger", End)] == [0]


def test_workers_that_do_not_host_every_policy_of_a_stream_get_none_of_it() -> None:
    driver = fed(two(), prompts=9)
    demand(driver, capacity=99, versions={0: 0})
    assert driver.records("admissions") == []


def test_a_score_task_names_the_members_and_goes_first() -> None:
    driver = fed(make_config(group_size=1), prompts=3)
    demand(driver, capacity=1)
    members = [Source(topic="trajectories", partition=0, offset=7)]
    driver.append("ledger", NeedsScore(policy=0, group=0, members=members))
    driver.settle()
    demand(driver, capacity=1, read=1)
    (task,) = tasks(driver, "score")
    assert (task.group, task.members, task.prompt.prompt_id) == (0, members, "main-0")
    assert len(tasks(driver)) == 1


def evaluated(priority: str = "after", group_size: int = 1) -> TopologyDriver:
    config = make_config(
        evaluation={"dataset": "held", "every": 2, "samples": 2, "priority": priority, "temperature": 0.5},
        group_size=group_size,
    )
    driver = make_driver(config, "schedule")
    for number in range(2):
        driver.append("prompts", make_prompt(number, "@eval"))
    for number in range(30):
        driver.append("prompts", make_prompt(number))
    return driver


def evals(driver: TopologyDriver) -> list[tuple[int, int, int]]:
    return [(t.group, t.replica, t.policies[0].min_version) for t in tasks(driver, "eval")]


def test_version_0_is_evaluated_before_anything_is_trained() -> None:
    driver = evaluated()
    demand(driver, capacity=5)
    assert [t.kind for t in of_type(driver, "tasks", Task)] == ["eval"] * 4 + ["train"]
    assert sorted(evals(driver)) == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    task = tasks(driver, "eval")[0]
    assert (task.prompt.stream, task.sampling.temperature, task.policies[0].pinned) == ("@eval", 0.5, False)


def test_evaluation_goes_after_the_groups_admitted_so_far_or_before_them() -> None:
    for priority, expected in (
        ("after", ["train"] * 3 + ["eval"] * 4 + ["train"]),
        ("before", ["eval"] * 4 + ["train"] * 4),
    ):
        driver = evaluated(priority, group_size=4)
        demand(driver, capacity=5)
        driver.append("steps", make_step(1))
        driver.append("steps", make_step(2))
        demand(driver, "w1", capacity=8, versions={0: 2})
        assert [t.kind for t in of_type(driver, "tasks", Task) if t.worker == "w1"] == expected


def test_an_evaluation_takes_nothing_from_workers_that_only_train_and_cancels_nothing() -> None:
    driver = evaluated("before", group_size=4)
    demand(driver, "w0", role="train", capacity=8)
    demand(driver, "e0", role="eval", capacity=3)
    driver.append("steps", make_step(1))
    driver.append("steps", make_step(2))
    demand(driver, "w0", role="train", capacity=12, versions={0: 2})
    given = [(t.worker, t.kind) for t in of_type(driver, "tasks", Task)]
    assert given.count(("w0", "train")) == 12 and given.count(("e0", "eval")) == 3 and len(given) == 15
    assert all(bound.pinned for task in tasks(driver, "eval") for bound in task.policies)
    assert {v for _, _, v in evals(driver)} == {0}, "the version issued first goes first"
    assert not of_type(driver, "tasks", Cancel) and not of_type(driver, "ledger", Closed)


def test_every_second_version_and_the_last_are_evaluated_and_the_run_waits_for_them() -> None:
    driver = evaluated()
    demand(driver, capacity=99)
    for batch in (1, 2, 3):
        driver.append("steps", make_step(batch))
    driver.append("steps", Stop(reason="steps", policy=0))
    driver.settle()
    assert sorted({v for _, _, v in evals(driver)}) == [0, 2, 3]
    for group in range(4):
        driver.append("ledger", closed(group, "end", by="batch"))
    driver.settle()
    assert not of_type(driver, "run", RunEnd)
    demand(driver, capacity=99, read=99)
    assert len(of_type(driver, "run", RunEnd)) == 1
    assert schedule(driver).finished()


def test_end_of_data_ends_the_ledger_only_when_nothing_can_open_any_more() -> None:
    driver = fed(make_config(group_size=1), prompts=1, end=True)
    driver.settle()
    assert not of_type(driver, "ledger", End), "a prompt waits"
    demand(driver, capacity=1)
    assert not of_type(driver, "ledger", End), "the group may fail and be admitted again"
    driver.append("ledger", Kept(policy=0, group=0))
    driver.settle()
    assert [(e.reason, e.policy) for e in of_type(driver, "ledger", End)] == [("data", 0)]


def test_the_run_ends_with_stop_for_every_reader_and_the_end_mark() -> None:
    config = make_config(parts=3)
    driver = fed(config)
    driver.append("steps", Stop(reason="steps", policy=0))
    driver.settle()
    assert len(of_type(driver, "admissions", Stop)) == 3
    assert len(of_type(driver, "tasks", Stop)) == config.run.inboxes
    (mark,) = driver.log["run", 0]
    assert isinstance(mark.record, RunEnd) and mark.key == b"end" and mark.record.reason == "steps"


def test_prompts_pause_above_a_mark_and_go_on_below_another() -> None:
    driver = fed(prompts=PAUSE_ABOVE + 50)
    driver.turn("schedule", read=lambda place, waiting: min(waiting, PAUSE_ABOVE + 1))
    task = driver.tasks["schedule", 0]
    assert task.paused == {"prompts"}
    assert not driver.behind("schedule")
    assert PAUSE_ABOVE > RESUME_BELOW
    for read in range(0, 4 * (PAUSE_ABOVE - RESUME_BELOW), 4):
        demand(driver, capacity=4, read=read)
        for group in range(read // 2, read // 2 + 2):
            driver.append("ledger", closed(group))
    driver.settle()
    assert task.paused == set()
    assert task.positions["prompts", 0] == PAUSE_ABOVE + 50


def test_a_prompt_of_a_stream_that_the_run_does_not_have_is_dropped_by_name() -> None:
    driver = fed()
    driver.append("prompts", make_prompt(0, "other"))
    demand(driver, capacity=9)
    assert driver.records("admissions") == []
    assert driver.metrics.counters["dropped_total", (("reason", "unknown_stream"), ("topic", "prompts"))] == 1


def test_a_crash_before_any_commit_changes_nothing_and_after_one_loses_nothing() -> None:
    def played(crashes: Many[str]) -> list[object]:
        driver = fed(make_config(parts=2), prompts=12, end=True)
        for number, crash in enumerate(crashes):
            driver.append("demand", make_demand(capacity=3 + number, read=number))
            driver.turn("schedule", crash=crash)  # type: ignore[arg-type]
            driver.settle()
        return [driver.records(topic) for topic in ("admissions", "ledger", "tasks")]

    calm = played(["none"] * 6)
    assert played(["before_commit", "after_commit"] * 3) == calm
    assert len(calm[2]) > 6  # type: ignore[arg-type]
