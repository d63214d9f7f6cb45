"""The decision at a start, case by case (protocol 8)."""

from typing import Any

import pytest

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Resumed, Rollback, Step, Stop
from headrace.trainers.lineage import Plan, Point, StepsSeen, ancestry, check_version, decide, rollback_base, seen_in


def point(lineage: int, batch: int, version: int | None = None) -> Point:
    return Point(lineage=lineage, batch=batch, version=batch if version is None else version)


def rollback(lineage: int, base: Point) -> Rollback:
    return Rollback(
        policy=0,
        lineage=lineage,
        base_lineage=base.lineage,
        base_batch=base.batch,
        base_version=base.version,
    )


def seen(*versions: int, back: Rollback | None = None, stopped: bool = False) -> StepsSeen:
    return StepsSeen(stopped=stopped, rollbacks=(back,) if back else (), announced=frozenset(versions))


def step(batch: int, version: int) -> Step:
    return Step(
        policy=0,
        batch=batch,
        version=version,
        lineage=0,
        updates=1,
        loss=0.0,
        tokens=1,
        sequences=1,
        wait_seconds=0.0,
        step_seconds=0.0,
        publish_seconds=0.0,
        delta_bytes=1,
        changed_share=1.0,
        finished_ms=1,
    )


BACK = rollback(1, point(0, 10))
TABLE: dict[str, tuple[StepsSeen, Point | None, list[Point], dict[str, Any]]] = {
    "first start": (seen(), None, [], {"first": True}),
    "killed after version 0": (seen(), point(0, 0), [], {"retrain_to": 0}),
    "killed between delta and Step of the first batch": (
        seen(), point(0, 1), [], {"retrain_to": 1, "announce": "Step"},
    ),
    "no checkpoint yet: all batches are trained again": (seen(1, 2, 3), point(0, 3), [], {"retrain_to": 3}),
    "checkpoint behind the head": (
        seen(*range(1, 14)), point(0, 13), [point(0, 10)], {"start": point(0, 10), "retrain_to": 13},
    ),
    "checkpoint at the head": (
        seen(*range(1, 11)), point(0, 10), [point(0, 10)], {"start": point(0, 10), "retrain_to": 10},
    ),
    "killed between checkpoint and delta": (
        seen(*range(1, 10)), point(0, 9), [point(0, 10)],
        {"start": point(0, 10), "retrain_to": 10, "publish": "Step"},
    ),
    "killed between delta and Step after a checkpoint": (
        seen(*range(1, 10)), point(0, 10), [point(0, 10)],
        {"start": point(0, 10), "retrain_to": 10, "announce": "Step"},
    ),
    "of two checkpoints the newest": (
        seen(*range(1, 22)), point(0, 21), [point(0, 10), point(0, 20)], {"start": point(0, 20), "retrain_to": 21},
    ),
    "versions with a gap: batches decide": (
        seen(1, 2, 5), point(0, 3, 5), [point(0, 2)], {"start": point(0, 2), "retrain_to": 3},
    ),
    "killed between Rollback and the delta of its base": (
        seen(*range(1, 16), back=BACK), point(0, 15), [point(0, 10)],
        {"lineage": 1, "start": point(0, 10), "retrain_to": 10, "publish": "Resumed"},
    ),
    "rolled back to the initial weights": (
        seen(1, 2, back=rollback(1, point(0, 0))), point(0, 2), [point(0, 2)],
        {"lineage": 1, "retrain_to": 0, "publish": "Resumed"},
    ),
    "killed between that delta and Resumed": (
        seen(*range(1, 16), back=BACK), point(1, 10, 16), [point(0, 10)],
        {"lineage": 1, "start": point(0, 10), "retrain_to": 10, "announce": "Resumed"},
    ),
    "in the new lineage without a checkpoint of its own": (
        seen(*range(1, 19), back=BACK), point(1, 12, 18), [point(0, 10)],
        {"lineage": 1, "start": point(0, 10), "retrain_to": 12},
    ),
    "checkpoints of the old lineage beyond the base do not count": (
        seen(*range(1, 30), back=BACK), point(1, 12, 29), [point(0, 10), point(0, 20)],
        {"lineage": 1, "start": point(0, 10), "retrain_to": 12},
    ),
    "a checkpoint of the new lineage": (
        seen(*range(1, 30), back=BACK), point(1, 21, 29), [point(0, 10), point(0, 30), point(1, 20, 28)],
        {"lineage": 1, "start": point(1, 20, 28), "retrain_to": 21},
    ),
    "stopped": (seen(1, stopped=True), point(0, 1), [point(0, 1)], {"stopped": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_decisions(name: str) -> None:
    steps, head, checkpoints, wanted = TABLE[name]
    plan = decide(steps, head, checkpoints)
    assert plan == Plan(**wanted)
    assert plan.start == wanted.get("start")
    assert plan.publish is None or plan.announce is None


def test_a_store_of_another_run_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"store\.url"):
        decide(seen(1, 2), None, [point(0, 2)])
    with pytest.raises(ConfigurationError, match="lineage 2"):
        decide(seen(1), point(2, 1), [])


def test_a_lineage_that_has_lost_its_base_goes_on_from_an_older_checkpoint() -> None:
    """More batches are trained again, then the base's weights are published; never those of a batch beyond it."""
    steps = seen(*range(1, 16), back=BACK)
    plan = decide(steps, point(0, 15), [point(0, 4), point(0, 20)])
    assert plan == Plan(lineage=1, start=point(0, 4), retrain_to=10, publish="Resumed")
    assert decide(steps, point(0, 15), []) == Plan(lineage=1, retrain_to=10, publish="Resumed")
    steps = seen(*range(1, 19), back=BACK)
    assert decide(steps, point(1, 12, 18), [point(0, 4)]) == Plan(lineage=1, start=point(0, 4), retrain_to=12)


def test_the_way_to_a_lineage_leads_through_all_its_bases() -> None:
    backs = (rollback(1, point(0, 10)), rollback(2, point(1, 15)), rollback(3, point(0, 6)))
    kept = [point(line, batch) for line in (0, 1, 2, 3) for batch in (5, 8, 12, 14, 20)]

    def way(count: int) -> list[tuple[int, int]]:
        return [(p.lineage, p.batch) for p in ancestry(StepsSeen(rollbacks=backs[:count]), kept)]

    assert way(0) == [(0, 5), (0, 8), (0, 12), (0, 14), (0, 20)]
    assert way(1) == [(0, 5), (0, 8), *((1, batch) for batch in (5, 8, 12, 14, 20))]
    assert way(2) == [(0, 5), (0, 8), (1, 5), (1, 8), (1, 12), (1, 14), *((2, b) for b in (5, 8, 12, 14, 20))]
    assert way(3) == [(0, 5), *((3, batch) for batch in (5, 8, 12, 14, 20))]


def test_a_late_step_is_written_once() -> None:
    before = decide(seen(), point(0, 1), [])
    after = decide(seen(1), point(0, 1), [])
    assert (before.announce, after.announce) == ("Step", None)


def test_the_steps_topic_is_read_in_order() -> None:
    second = rollback(2, point(1, 12, 18))
    state = seen_in([step(1, 1), BACK, Resumed(policy=0, lineage=1, batch=10, version=16), step(11, 17), second])
    assert state == StepsSeen(rollbacks=(BACK, second), announced=frozenset({1, 16, 17}))
    assert (state.rollback, state.base) == (second, point(1, 12, 18))
    assert state.lineage == 2
    assert seen_in([Stop(reason="steps", policy=0)]).stopped


def test_going_back_takes_the_newest_checkpoint_at_or_before_the_version() -> None:
    kept = [point(0, 10), point(0, 20)]
    assert rollback_base(seen(1), kept, 25) == point(0, 20)
    assert rollback_base(seen(1), kept, 19) == point(0, 10)
    assert rollback_base(seen(1), kept, 0) == point(0, 0)
    with pytest.raises(ConfigurationError, match="versions 10, 20"):
        rollback_base(seen(1), kept, 9)


def test_going_back_to_a_version_that_never_was_is_refused() -> None:
    """Unless it may be one of another policy's, which has come further."""
    check_version(point(0, 20), 20, alone=True)
    check_version(point(0, 20), 25, alone=False)
    with pytest.raises(ConfigurationError, match=r"25: there is no such version, the newest is 20"):
        check_version(point(0, 20), 25, alone=True)
    with pytest.raises(ConfigurationError, match="nothing is published"):
        check_version(None, 0, alone=False)


def test_going_back_stays_within_the_lineage() -> None:
    kept = [point(0, 10), point(0, 20), point(1, 15, 26)]
    assert rollback_base(seen(1, back=BACK), kept, 30) == point(1, 15, 26)
    assert rollback_base(seen(1, back=BACK), kept, 25) == point(0, 10)


def test_going_back_is_refused_after_stop() -> None:
    with pytest.raises(ConfigurationError, match="stopped"):
        rollback_base(seen(1, stopped=True), [point(0, 10)], 10)
