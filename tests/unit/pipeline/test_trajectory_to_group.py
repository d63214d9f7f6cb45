"""``assemble`` on the driver: what opens, counts, closes and is dropped (protocol 6)."""

from __future__ import annotations

from typing import Any

import pytest
from stage_feed import make_admission, make_config, make_driver, make_sequence, make_trajectory, of_type

from headrace.pipeline.operators.operator import GroupDraft, OperatorConfiguration, OperatorContext
from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.pipeline.trajectory_to_group import Assemble
from headrace.schemas.config import RunConfig
from headrace.schemas.parts import AdmittedPolicy, BlobRef, MemberScore, Reward, Source
from headrace.schemas.records import Closed, Failed, Group, Kept, Member, NeedsScore, Score, Stop

DEADLINE = 2_000_000
DYNAMIC = {"type": "dynamic_sampling"}


def fed(*, admitted: int = 1, config: RunConfig | None = None, **admission: Any) -> TopologyDriver:
    """A driver of ``assemble`` with open groups of two."""
    driver = make_driver(config or make_config(), "assemble")
    for group in range(admitted):
        driver.append("admissions", make_admission(group, deadline_ms=DEADLINE, **admission))
    driver.settle()
    return driver


def report(driver: TopologyDriver, *results: tuple[int, float], group: int = 0, **more: Any) -> None:
    """Trajectories of (replica, reward)."""
    for replica, reward in results:
        driver.append("trajectories", make_trajectory(group, replica, reward, **more))
    driver.settle()


def at_deadline(driver: TopologyDriver, milliseconds: int = 2000) -> None:
    driver.advance(DEADLINE + milliseconds - driver.now_ms)


def endings(driver: TopologyDriver) -> list[tuple[str, int, str]]:
    """(what, group, detail) of every Kept and Closed."""
    return [
        ("kept", r.group, "") if isinstance(r, Kept) else (r.reason, r.group, r.detail)
        for r in driver.records("ledger")
        if isinstance(r, Kept | Closed)
    ]


def dropped(driver: TopologyDriver, reason: str) -> float:
    return driver.metrics.counters["dropped_total", (("reason", reason), ("topic", "trajectories"))]


def test_a_group_closes_when_enough_are_usable_with_members_before_group() -> None:
    driver = fed()
    report(driver, (1, 1.0))
    assert driver.records("groups") == []
    report(driver, (0, 0.0))
    first, second, group = driver.records("groups")
    assert isinstance(first, Member) and isinstance(second, Member) and isinstance(group, Group)
    assert (first.replica, second.replica) == (0, 1)
    assert first.sources == [Source(topic="trajectories", partition=0, offset=1)]
    assert (group.members, group.counted, group.trained, group.short) == (2, 2, 2, False)
    assert (group.reward_mean, group.reward_std) == (0.5, pytest.approx(0.7071067811865476))
    assert (group.oldest_version, group.newest_version, group.tokens) == (0, 0, 4)
    (kept,) = of_type(driver, "ledger", Kept)
    assert (kept.group, kept.reward_mean, kept.complete) == (0, 0.5, True)


def test_the_first_usable_results_are_the_members_and_the_rest_is_late() -> None:
    driver = fed(extra_replicas=1)
    report(driver, (2, 1.0), (0, 0.0), (1, 0.0))
    assert [m.replica for m in of_type(driver, "groups", Member)] == [0, 2]
    assert dropped(driver, "late") == 1


def test_a_repeated_replica_is_dropped_and_a_usable_result_beats_an_excluded_one() -> None:
    driver = fed()
    report(driver, (0, 0.0), usable=False)
    report(driver, (0, 1.0), attempt=1)
    report(driver, (0, 0.0), attempt=2)
    report(driver, (0, 0.0), attempt=3, usable=False)
    assert dropped(driver, "duplicate") == 2
    report(driver, (1, 0.0))
    assert [(m.replica, m.attempt, m.status) for m in of_type(driver, "groups", Member)] == [
        (0, 1, "train"), (1, 0, "train"),
    ]  # fmt: skip


def test_when_every_replica_has_reported_a_short_group_is_kept_with_its_excluded_members() -> None:
    driver = fed(group_size=3)
    report(driver, (0, 0.0), (1, 1.0))
    assert endings(driver) == []
    report(driver, (2, 9.0), usable=False)
    assert endings(driver) == [("kept", 0, "")]
    group = of_type(driver, "groups", Group)[0]
    assert (group.members, group.counted, group.trained, group.short) == (3, 2, 2, True)
    assert group.raw_mean == 0.5, "an excluded member counts nowhere"
    assert of_type(driver, "groups", Member)[2].status == "excluded"
    assert of_type(driver, "ledger", Kept)[0].complete is False


def test_below_min_members_the_group_fails_with_the_errors_in_words() -> None:
    driver = fed()
    report(driver, (0, 1.0))
    report(driver, (1, 0.0), usable=False)
    assert endings(driver) == [("failed", 0, "attempts: 1 of 2 usable; it failed")]
    assert driver.records("groups") == []


def test_a_failed_replica_counts_as_reported_and_a_result_may_still_overtake_it() -> None:
    driver = fed(group_size=3)
    report(driver, (0, 0.0), (1, 1.0))
    driver.append("admissions", Failed(kind="train", group=0, replica=2, attempts=3, lost_leases=0))
    driver.append("trajectories", make_trajectory(0, 2, 1.0))
    driver.turn("assemble", read=lambda place, waiting: 0 if place[0] == "trajectories" else waiting)
    driver.turn("assemble", read=lambda place, waiting: 0 if place[0] == "trajectories" else waiting)
    assert endings(driver) == [], "the inputs have not been read to their ends"
    driver.settle()
    assert of_type(driver, "groups", Group)[0].short is False


def test_at_its_deadline_a_group_is_kept_short_or_fails_and_not_before_two_seconds_more() -> None:
    driver = fed(admitted=2, group_size=3)
    report(driver, (0, 0.0), (1, 1.0))
    at_deadline(driver, 1999)
    assert endings(driver) == []
    at_deadline(driver)
    assert sorted(endings(driver)) == [("failed", 1, "deadline: 0 of 3 usable"), ("kept", 0, "")]


def test_a_group_whose_tasks_all_died_still_ends() -> None:
    driver = fed()
    at_deadline(driver)
    assert endings(driver) == [("failed", 0, "deadline: 0 of 2 usable")]


@pytest.mark.parametrize(
    "foreign",
    [
        {"stream": "other"},
        {"policies": []},
        {"policies": [AdmittedPolicy(policy=7, min_version=0, cap=1)]},
        {"group_size": 0},
    ],
)
def test_an_admission_of_what_the_run_does_not_have_is_refused_and_not_at_its_deadline(foreign: dict[str, Any]) -> None:
    driver = fed(**foreign)
    at_deadline(driver)
    ((received, error),) = driver.dead_letters
    assert received.topic == "admissions" and "which this run does not have" in str(error)
    assert endings(driver) == []


def test_what_was_written_before_the_timer_is_read_before_it_fires() -> None:
    driver = fed()
    driver.append("trajectories", make_trajectory(0, 0))
    driver.append("trajectories", make_trajectory(0, 1))
    driver.now_ms = DEADLINE + 5000
    for _ in range(3):
        driver.turn("assemble", read=lambda place, waiting: 0)
    assert endings(driver) == []
    driver.settle()
    assert endings(driver) == [("kept", 0, "")]


def test_time_without_a_broker_does_not_count_towards_the_deadline() -> None:
    driver = fed()
    driver.now_ms = DEADLINE + 60_000
    driver.reachable_since_ms = driver.now_ms
    driver.settle()
    assert endings(driver) == []
    driver.advance(1999)
    assert endings(driver) == []
    driver.advance(1)
    assert len(endings(driver)) == 1


def test_a_result_of_an_unknown_group_waits_until_admissions_are_read_to_their_end() -> None:
    driver = make_driver(make_config(), "assemble")
    driver.append("trajectories", make_trajectory(0, 0))
    driver.append("trajectories", make_trajectory(7, 0))
    driver.append("admissions", make_admission(0))

    def trajectories_only(place: tuple[str, int], waiting: int) -> int:
        return waiting if place[0] == "trajectories" else 0

    for _ in range(3):
        driver.turn("assemble", read=trajectories_only)
    assert dropped(driver, "not_open") == 0
    driver.crash("assemble")
    driver.settle()
    assert dropped(driver, "not_open") == 1
    report(driver, (1, 1.0))
    assert endings(driver) == [("kept", 0, "")]


def test_closed_groups_are_remembered_until_the_watermark_passes() -> None:
    driver = fed(admitted=2)
    for group in (0, 1):
        report(driver, (0, 0.0), (1, 1.0), group=group)
    stage = driver.stage_of("assemble")
    assert isinstance(stage, Assemble) and stage.closed == {0, 1}
    driver.append("admissions", make_admission(2, watermark=0))
    driver.settle()
    assert stage.closed == {1}
    report(driver, (0, 0.0), group=0)
    report(driver, (0, 0.0), group=1)
    assert dropped(driver, "late") == 2
    assert stage.parked == {}


def test_dynamic_sampling_closes_by_name_with_the_numbers() -> None:
    driver = fed(config=make_config(operators=[DYNAMIC]))
    report(driver, (0, 1.0), (1, 1.0))
    (closed,) = of_type(driver, "ledger", Closed)
    assert (closed.reason, closed.by, closed.operator) == ("filtered", "assemble", "dynamic_sampling")
    assert closed.detail == "zero_variance: all 2 rewards are 1"
    assert (closed.prompt_id, closed.raw_mean, closed.raw_std) == ("main-0", 1.0, 0.0)
    assert driver.records("groups") == []


@pytest.mark.parametrize("rest", ["baseline_only", "renormalise"])
def test_what_is_learned_of_a_group_is_what_all_of_its_members_earned(rest: str) -> None:
    """A choice of members says nothing about how often the prompt is solved."""
    driver = fed(
        config=make_config(operators=[{"type": "downsample", "keep": 2, "rest": rest}], group_size=4), group_size=4
    )
    report(driver, (0, 0.0), (1, 0.0), (2, 1.0), (3, 0.0))
    (kept,) = of_type(driver, "ledger", Kept)
    assert (kept.raw_rewards, kept.raw_mean, kept.complete) == ([0.0, 0.0, 1.0, 0.0], 0.25, True)
    assert kept.reward_mean == (0.25 if rest == "baseline_only" else 0.5)


def test_each_policy_gets_its_own_members_and_its_own_ending() -> None:
    config = make_config(
        policies={"a": {"model": "none"}, "b": {"model": "none"}}, operators=[{**DYNAMIC, "policy": "b"}]
    )
    both = [AdmittedPolicy(policy=p, min_version=0, cap=4) for p in (0, 1)]
    driver = fed(config=config, policies=both)
    sequences = [make_sequence(0, 3), make_sequence(1, 5, tokens=3)]
    report(driver, (0, 1.0), (1, 1.0), sequences=sequences)
    assert [m.policy for m in of_type(driver, "groups", Member, 0)] == [0, 0]
    (group,) = of_type(driver, "groups", Group)
    assert (group.policy, group.oldest_version, group.tokens) == (0, 3, 4)
    assert [(type(r).__name__, r.policy) for r in driver.records("ledger")] == [  # type: ignore[union-attr]
        ("Kept", 0), ("Closed", 1),
    ]  # fmt: skip


def test_a_group_gives_nothing_to_a_policy_that_it_opened_no_credit_for() -> None:
    config = make_config(policies={"a": {"model": "none"}, "b": {"model": "none"}})
    driver = fed(config=config, policies=[AdmittedPolicy(policy=1, min_version=0, cap=4)])
    report(driver, (0, 1.0), (1, 0.0), sequences=[make_sequence(0), make_sequence(1)])
    assert {m.policy for m in of_type(driver, "groups", Member)} == {1}


def scored() -> TopologyDriver:
    config = make_config()
    driver = TopologyDriver(config, {"assemble": lambda c, n: Assemble(c, n, frozenset({"main"}))})
    driver.append("admissions", make_admission(0, deadline_ms=DEADLINE))
    driver.settle()
    return driver


def test_a_scored_group_asks_once_and_closes_with_the_scores() -> None:
    driver = scored()
    report(driver, (1, 1.0), (0, 0.0))
    report(driver, (0, 5.0), attempt=1)
    (asked,) = of_type(driver, "ledger", NeedsScore)
    assert [(m.topic, m.offset) for m in asked.members] == [("trajectories", 1), ("trajectories", 0)]
    driver.crash("assemble")
    scores = [MemberScore(replica=0, name="judge", value=0.25), MemberScore(replica=1, name="judge", value=0.5)]
    driver.append("trajectories", Score(group=0, worker="w0", finished_ms=9, scores=scores))
    driver.settle()
    assert len(of_type(driver, "ledger", NeedsScore)) == 1
    assert [(m.raw_reward, [r.name for r in m.rewards]) for m in of_type(driver, "groups", Member)] == [
        (0.25, ["judge"]), (1.5, ["judge"]),
    ]  # fmt: skip


def test_a_member_that_could_not_be_judged_is_excluded_and_the_others_keep_theirs() -> None:
    first = MemberScore(replica=0, name="judge", value=0.25)
    scores = [first, MemberScore(replica=1, name="", value=0, error="no mark")]
    cost = {"judge_tokens": 7.0}
    driver = TopologyDriver(make_config(), {"assemble": lambda c, n: Assemble(c, n, frozenset({"main"}))})
    driver.append("admissions", make_admission(0, group_size=3, deadline_ms=DEADLINE))
    report(driver, (0, 1.0), (1, 0.0), (2, 0.5))
    more = [*scores, MemberScore(replica=2, name="judge", value=1.0)]
    driver.append("trajectories", Score(group=0, worker="w0", finished_ms=9, scores=more, metrics=cost))
    driver.settle()
    assert [(m.status, m.raw_reward, m.error) for m in of_type(driver, "groups", Member)] == [
        ("train", 1.25, ""), ("excluded", 0.0, "no mark"), ("train", 1.5, ""),
    ]  # fmt: skip
    assert of_type(driver, "groups", Group)[0].short


def test_a_group_of_which_too_few_could_be_judged_fails() -> None:
    driver = scored()
    report(driver, (0, 1.0), (1, 0.0))
    scores = [MemberScore(replica=0, name="judge", value=0.25), MemberScore(replica=1, name="", value=0, error="no")]
    driver.append("trajectories", Score(group=0, worker="w0", finished_ms=9, scores=scores))
    driver.settle()
    assert [e[0] for e in endings(driver)] == ["failed"]


def test_scoring_fails_the_group_when_it_fails_or_passes_the_deadline() -> None:
    driver = scored()
    report(driver, (1, 1.0), (0, 0.0))
    driver.append("admissions", Failed(kind="score", group=0, replica=0, attempts=3, lost_leases=0))
    driver.settle()
    assert [e[0] for e in endings(driver)] == ["failed"]
    driver = scored()
    report(driver, (1, 1.0), (0, 0.0))
    at_deadline(driver)
    assert [e[0] for e in endings(driver)] == ["failed"]


def test_a_full_context_and_an_empty_completion_count_in_the_statistics_only() -> None:
    driver = fed(group_size=3)
    report(driver, (0, 1.0))
    report(driver, (1, 0.0), end_reason="context_full")
    report(driver, (2, 0.0), sequences=[])
    assert [m.status for m in of_type(driver, "groups", Member)] == ["train", "baseline_only", "baseline_only"]
    group = of_type(driver, "groups", Group)[0]
    assert (group.counted, group.trained, group.tokens) == (3, 1, 2)
    assert group.raw_mean == pytest.approx(1 / 3)


def test_a_group_without_a_token_to_train_fails() -> None:
    driver = fed()
    report(driver, (0, 1.0), (1, 0.0), sequences=[])
    assert endings(driver) == [("failed", 0, "attempts: 2 of 2 usable; no member has tokens to train")]


def test_an_offloaded_trajectory_passes_on_its_reference() -> None:
    driver = fed()
    blob = BlobRef(key="blobs/0/0/0", size=9, digest="d")
    report(driver, (0, 1.0), (1, 0.0), sequences=[], blob=blob, oldest_versions={"main": 4}, tokens=1000)
    assert [(m.blob, m.length, m.oldest_version) for m in of_type(driver, "groups", Member)] == [(blob, 1000, 4)] * 2


def test_role_rewards_go_to_the_policy_that_played_the_role() -> None:
    config = make_config(policies={"a": {"model": "none"}, "b": {"model": "none"}})
    both = [AdmittedPolicy(policy=p, min_version=0, cap=4) for p in (0, 1)]
    driver = fed(config=config, policies=both)
    solver, judge = make_sequence(0), make_sequence(1)
    object.__setattr__(solver, "role", "solver")
    object.__setattr__(judge, "role", "judge")
    rewards = [
        Reward(name="all", value=1.0), Reward(name="s", value=2.0, role="solver"),
        Reward(name="j", value=4.0, role="judge"), Reward(name="turn", value=8.0, role="judge", turn=0),
    ]  # fmt: skip
    report(driver, (0, 1.0), (1, 1.0), sequences=[solver, judge], rewards=rewards)
    assert {m.policy: m.raw_reward for m in of_type(driver, "groups", Member)} == {0: 3.0, 1: 5.0}


@pytest.mark.parametrize("rewards", [(1e200, -1e200), (1.7e308, -1.7e308), (1.7e308, 1.6e308), (-1e308, 0.0)])
def test_rewards_too_large_to_be_squared_or_added_close_their_group(rewards: tuple[float, float]) -> None:
    driver = fed()
    report(driver, *enumerate(rewards))
    assert endings(driver) == [("kept", 0, "")]
    (group,) = of_type(driver, "groups", Group)
    assert min(rewards) <= group.raw_mean <= max(rewards)
    assert 0 < group.raw_std < float("inf")


def test_a_reward_whose_parts_have_no_finite_sum_is_excluded_by_name() -> None:
    driver = fed()
    report(driver, (0, 1.0))
    report(driver, (1, 1.0), rewards=[Reward(name=name, value=1.7e308) for name in "ab"])
    assert endings(driver) == [("kept", 0, "")]
    members = of_type(driver, "groups", Member)
    assert [m.status for m in members] == ["train", "excluded"]
    assert members[1].error == "the parts of its reward have no finite sum"


class Breaks:
    """An operator that raises."""

    kind = "filter"
    Configuration = OperatorConfiguration

    def __init__(self, configuration: OperatorConfiguration) -> None:
        self.configuration = configuration

    def open(self, context: OperatorContext) -> None: ...

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        raise ZeroDivisionError("no members")

    def on_timer(self, timer: str, context: OperatorContext) -> None: ...

    def close(self) -> None: ...


def test_an_operator_that_raises_fails_the_group_by_name_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("operator_chain", "prompt_chain"):
        monkeypatch.setattr(f"headrace.pipeline.{module}.operator_class", lambda entry: Breaks)
    driver = fed(config=make_config(operators=[{"type": "breaks"}]), admitted=2)
    for group in (0, 1):
        report(driver, (0, 0.0), (1, 1.0), group=group)
    assert [(what, g) for what, g, _ in endings(driver)] == [("failed", 0), ("failed", 1)]
    assert all(detail.startswith("raised ZeroDivisionError: no members (") for *_, detail in endings(driver))
    assert of_type(driver, "ledger", Closed)[0].operator == "breaks"


def test_state_survives_crashes_between_any_two_records() -> None:
    config = make_config(operators=[DYNAMIC])

    def played(crash: bool) -> list[Any]:
        driver = fed(admitted=3, config=config, group_size=3)
        for replica in range(3):
            for group in range(3):
                report(driver, (replica, float(group and replica)), group=group, usable=(group, replica) != (1, 2))
                if crash:
                    driver.crash("assemble")
        at_deadline(driver)
        return [driver.records("groups"), driver.records("ledger")]

    assert str(played(True)) == str(played(False))
    assert len(played(False)[1]) == 3


def test_stop_finishes_the_task_also_after_a_crash() -> None:
    driver = fed()
    driver.append("admissions", Stop(reason="data"))
    driver.settle()
    assert driver.stage_of("assemble").finished()
    driver.crash("assemble")
    assert driver.stage_of("assemble").finished()
