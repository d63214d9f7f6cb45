"""``batch`` on the driver: what is composed when, of which groups, and what closes (protocol 4, 9)."""

from __future__ import annotations

from typing import Any

from stage_feed import make_config, make_driver, make_members, make_opened, make_step, of_type

from headrace.pipeline.group_to_batch import Batch
from headrace.pipeline.runtime.driver import TopologyDriver
from headrace.schemas.digests import lane_digest
from headrace.schemas.records import Batched, Closed, End, Item, Kept, Manifest, Resumed, Stop, Trained


def fed(*, trainer: dict[str, Any] | None = None, **policy: Any) -> TopologyDriver:
    """A driver of ``batch``; batches of two groups."""
    config = make_config(policies={"main": {"model": "none", **policy}}, trainer=trainer)
    return make_driver(config, "batch")


def opened(driver: TopologyDriver, *groups: int, version: int = 0) -> None:
    for group in groups:
        driver.append("ledger", make_opened(group, version))
    driver.settle()


def kept(driver: TopologyDriver, *groups: int, oldest: int = 0, **more: Any) -> None:
    for group in groups:
        for record in make_members(group, oldest, **more):
            driver.append("groups", record)
        driver.append("ledger", Kept(policy=0, group=group))
    driver.settle()


def batches(driver: TopologyDriver) -> list[list[int]]:
    return [list(dict.fromkeys(m.group for m in r.members)) for r in of_type(driver, "manifests", Manifest)]


def endings(driver: TopologyDriver) -> list[tuple[int, str]]:
    return [(r.group, r.reason) for r in of_type(driver, "ledger", Closed)]


def stepped(driver: TopologyDriver, *batch: int) -> None:
    for number in batch:
        driver.append("steps", make_step(number))
    driver.settle()


def test_a_batch_is_composed_of_the_first_f_groups_with_everything_in_one_transaction() -> None:
    driver = fed()
    opened(driver, 0, 1, 2)
    kept(driver, 2)
    assert batches(driver) == []
    kept(driver, 0, tokens=(3, 5))
    (manifest,) = of_type(driver, "manifests", Manifest)
    assert (manifest.batch, manifest.start_version, manifest.since_version) == (1, 0, 0)
    assert (manifest.fresh_groups, manifest.groups, manifest.trajectories, manifest.tokens) == (2, 2, 4, 12)
    assert of_type(driver, "ledger", Batched)[0].groups == [0, 2]
    for lane in manifest.lanes:
        log = [e for e in driver.log["batches.main", lane.lane] if isinstance(e.record, Item)]
        assert lane.count == len(log)
        assert lane.digest == lane_digest(e.value for e in log)
        assert [e.record.index for e in log] == list(range(len(log)))
        assert len({e.record.group for e in log}) == 1, "a group shares a lane"


def test_a_group_counts_only_when_its_opened_has_been_read() -> None:
    driver = fed()
    kept(driver, 0, 1)
    assert batches(driver) == []
    opened(driver, 0)
    assert batches(driver) == []
    opened(driver, 1)
    assert batches(driver) == [[0, 1]]


def test_batches_wait_for_the_step_that_ahead_allows() -> None:
    for depth, ahead, expected in ((2, 1, 2), (2, 0, 1), (0, 5, 1)):
        driver = fed(depth=depth, ahead=ahead, max_staleness=9)
        opened(driver, *range(8))
        kept(driver, *range(8))
        assert len(batches(driver)) == expected, (depth, ahead)


def test_staleness_is_judged_against_the_start_version_and_stale_groups_close() -> None:
    driver = fed(depth=1, max_staleness=1, mode="drop")
    opened(driver, *range(5))
    opened(driver, 5, version=1)
    kept(driver, 0, 1)
    kept(driver, 2, 3, 4)
    stepped(driver, 1, 2)
    kept(driver, 5, oldest=1)
    assert batches(driver) == [[0, 1], [2, 3]]
    assert (4, "stale") in endings(driver), "batch 3 starts from version 2"
    assert (5, "stale") not in endings(driver)


def test_wait_takes_old_groups_so_that_later_batches_can_hold_the_rest() -> None:
    driver = fed(depth=1, max_staleness=1)
    opened(driver, 0, 1, 2, 3)
    opened(driver, 4, version=1)
    kept(driver, 4, oldest=1)
    kept(driver, 1)
    assert batches(driver) == [], "0 to 3 have their last chance in batch 2: two of them have to go now"
    kept(driver, 2)
    assert batches(driver) == [[1, 2]]
    stepped(driver, 1)
    kept(driver, 3)
    assert batches(driver) == [[1, 2]], "0 is waited for"
    kept(driver, 0)
    assert batches(driver) == [[1, 2], [0, 3]]
    assert endings(driver) == []


def test_drop_does_not_wait() -> None:
    driver = fed(depth=1, max_staleness=1, mode="drop")
    opened(driver, 0, 1, 2)
    opened(driver, 3, version=1)
    kept(driver, 3, oldest=1)
    kept(driver, 1)
    assert batches(driver) == [[1, 3]]
    kept(driver, 2)
    opened(driver, 4, version=1)
    kept(driver, 4, oldest=1)
    assert batches(driver)[1] == [2, 4]
    assert endings(driver) == [(0, "stale")], "its last chance was batch 2"
    assert driver.metrics.total("groups_ended") == 1


def test_depth_0_allows_lag_only_whatever_the_bound_says() -> None:
    driver = fed(depth=0, max_staleness=5, extra_groups=1)
    opened(driver, 0, 1, 2)
    kept(driver, 0, 1)
    assert batches(driver) == [[0, 1]]
    assert endings(driver) == [(2, "stale")], "surplus of the synchronous batch"
    kept(driver, 2)
    stepped(driver, 1)
    assert driver.metrics.total("dropped_total") == 3, "its members and its Group came too late"


def test_depth_0_goes_by_admission() -> None:
    driver = fed(depth=0)
    opened(driver, 4, 5)
    kept(driver, 5, 4)
    assert batches(driver) == [[4, 5]]


def test_a_group_closed_by_assemble_is_not_waited_for() -> None:
    driver = fed(depth=1, max_staleness=1)
    opened(driver, 0, 1, 2, 3)
    opened(driver, 4, version=1)
    kept(driver, 4, oldest=1)
    kept(driver, 1)
    driver.append("ledger", Closed(policy=0, group=2, reason="filtered", by="assemble"))
    driver.settle()
    assert batches(driver) == [[1, 4]]


def test_end_of_data_flushes_the_last_short_batch_and_ends_the_manifests() -> None:
    driver = fed()
    opened(driver, 0, 1, 2, 3)
    kept(driver, 0, 1, 2)
    driver.append("ledger", End(reason="data", policy=0))
    driver.settle()
    assert batches(driver) == [[0, 1]], "3 is open"
    kept(driver, 3)
    stepped(driver, 1, 2)
    assert batches(driver) == [[0, 1], [2, 3]]
    (end,) = of_type(driver, "manifests", End)
    assert (end.count, end.policy) == (2, 0)


def test_the_last_short_batch_is_trained_or_dropped_by_setting() -> None:
    for setting, expected in (("train", [[0, 1], [2]]), ("drop", [[0, 1]])):
        driver = fed(trainer={"last_batch": setting})
        opened(driver, 0, 1, 2)
        driver.append("ledger", End(reason="data", policy=0))
        kept(driver, 0, 1, 2)
        stepped(driver, 1)
        assert batches(driver) == expected
        assert endings(driver) == ([] if setting == "train" else [(2, "end")])
        assert len(of_type(driver, "manifests", End)) == 1


def test_stop_closes_open_kept_and_untrained_groups_as_end() -> None:
    driver = fed(depth=2, max_staleness=4)
    opened(driver, *range(6))
    kept(driver, 0, 1, 2, 3, 4)
    stepped(driver, 1)
    driver.append("steps", Stop(reason="steps", policy=0))
    driver.settle()
    assert sorted(endings(driver)) == [(2, "end"), (3, "end"), (4, "end"), (5, "end")]
    assert not of_type(driver, "manifests", End)
    assert not driver.stage_of("batch").finished()
    driver.append("ledger", End(reason="stopped", policy=0))
    driver.settle()
    assert driver.stage_of("batch").finished()
    opened(driver, 6)
    assert (6, "end") in endings(driver)


def test_a_rollback_shifts_versions_and_batches_wait_until_the_retrained_ones_are_there() -> None:
    driver = fed(depth=2, max_staleness=9)
    opened(driver, *range(10))
    kept(driver, *range(4))
    stepped(driver, 1, 2)
    driver.append("steps", Resumed(policy=0, lineage=1, batch=1, version=3))
    driver.settle()
    kept(driver, 4, 5)
    (third,) = of_type(driver, "manifests", Manifest)[2:]
    assert (third.batch, third.start_version, third.since_version) == (3, 4, 3)
    kept(driver, 6, 7)
    assert len(batches(driver)) == 3, "batch 2 is trained again first"
    driver.append("steps", make_step(2, version=4))
    driver.settle()
    assert of_type(driver, "manifests", Manifest)[3].start_version == 5


def test_a_discarding_resumed_evicts_what_opened_before_schedule_knew_of_it() -> None:
    driver = fed(depth=2, max_staleness=9)
    opened(driver, 0, 1, 2)
    kept(driver, 0)
    driver.append("steps", Resumed(policy=0, lineage=1, batch=0, version=5, discard=True))
    driver.settle()
    assert sorted(endings(driver)) == [(0, "evicted"), (1, "evicted"), (2, "evicted")]
    opened(driver, 3)
    assert (3, "evicted") in endings(driver), "schedule had not read the Resumed"
    driver.append("ledger", Trained(policy=0, batch=0, version=5, first=False))
    opened(driver, 4, 5, version=5)
    kept(driver, 4, 5, oldest=5)
    assert batches(driver) == [[4, 5]]
    kept(driver, 3)
    assert len(endings(driver)) == 4


def test_replay_adds_used_groups_within_the_bound_and_never_the_fresh_ones_again() -> None:
    driver = fed(trainer={"batch_groups": 4}, replay=0.5, depth=3, max_staleness=3, ahead=1)
    for batch in range(5):
        opened(driver, 2 * batch, 2 * batch + 1, version=batch)
        kept(driver, 2 * batch, 2 * batch + 1, oldest=batch)
        stepped(driver, batch + 1)
    manifests = of_type(driver, "manifests", Manifest)
    assert [m.fresh_groups for m in manifests] == [2, 2, 2, 2, 2]
    assert [m.replayed_groups for m in manifests] == [0, 2, 3, 3, 2]
    uses = [(m.group, m.use) for r in manifests for m in r.members if m.replica == 0]
    assert len(uses) == len(set(uses)), "every use has its number"
    assert all(r.start_version - m.oldest_version <= 3 for r in manifests for m in r.members)
    assert [r.groups for r in of_type(driver, "ledger", Batched)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_repeats_are_ignored() -> None:
    driver = fed()
    opened(driver, 0, 1, 0, 1)
    kept(driver, 0, 1)
    opened(driver, 0)
    kept(driver, 0, 1)
    assert batches(driver) == [[0, 1]]
    assert endings(driver) == []


def test_state_survives_crashes_between_any_two_records() -> None:
    def played(crash: bool) -> list[Any]:
        driver = fed(trainer={"batch_groups": 3}, replay=0.4, depth=2, max_staleness=3)
        for group in range(12):
            opened(driver, group, version=group // 3)
            if crash:
                driver.crash("batch")
            kept(driver, group, oldest=group // 3)
            if crash:
                driver.crash("batch")
            if group % 3 == 2:
                stepped(driver, group // 3 + 1)
        driver.append("ledger", End(reason="data", policy=0))
        driver.settle()
        return [driver.records("manifests"), driver.records("batches.main"), driver.records("ledger")]

    assert str(played(True)) == str(played(False))
    assert len(of_kind(played(False)[0], Manifest)) > 3


def of_kind(records: list[Any], kind: type[Any]) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


def test_the_store_keeps_nothing_of_groups_that_have_ended() -> None:
    driver = fed()
    for batch in range(4):
        opened(driver, 2 * batch, 2 * batch + 1)
        kept(driver, 2 * batch, 2 * batch + 1, oldest=batch)
        stepped(driver, batch + 1)
    stage = driver.stage_of("batch")
    assert isinstance(stage, Batch)
    assert len(driver.tasks["batch", 0].store) == 2, "progress and the highest group"
