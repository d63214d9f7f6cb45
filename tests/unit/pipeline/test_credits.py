"""Admission by the formula of protocol 3, and credits that end once."""

from __future__ import annotations

import pytest
from stage_feed import make_config, make_prompt

from headrace.pipeline.credits import KEPT, ROLLING, Credits, OpenGroup, PolicyCredits, fresh_groups, whole
from headrace.pipeline.runtime.store import MemoryStore, StoreView
from headrace.schemas.config import RunConfig


def policy(**more: object) -> PolicyCredits:
    fields = {
        "index": 0, "batch_groups": 32, "fresh": 32, "depth": 1.0, "extra": 0, "lag": 0, "filtered": False, **more
    }  # fmt: skip
    return PolicyCredits(**fields)  # type: ignore[arg-type]


def opened(held: Credits, store: StoreView, count: int, policies: tuple[int, ...] = (0,)) -> None:
    for _ in range(count):
        held.open(
            OpenGroup(
                group=held.next_group, stream="main", prompt=make_prompt(0), offset=0, replicas=2, retry=0,
                states=dict.fromkeys(policies, ROLLING), bounds=dict.fromkeys(policies, 0),
            ),
            store,
        )  # fmt: skip


def fresh_store() -> StoreView:
    return StoreView(MemoryStore(), b"s")


@pytest.mark.parametrize(
    ("depth", "extra", "kept", "untrained", "rolling", "expected", "cap"),
    [
        (0.0, 0, 0, 0, 31, True, 32),
        (0.0, 0, 0, 0, 32, False, 32),
        (1.0, 0, 0, 0, 63, True, 64),
        (1.0, 0, 20, 32, 12, False, 64),
        (1.0, 0, 20, 32, 11, True, 64),
        (0.5, 4, 0, 0, 51, True, 52),
        (0.5, 4, 0, 0, 52, False, 52),
    ],
)
def test_room_without_filters_is_exact(
    depth: float, extra: int, kept: int, untrained: int, rolling: int, expected: bool, cap: int
) -> None:
    p = policy(depth=depth, extra=extra, kept=kept, untrained=untrained, rolling=rolling)
    assert p.room() == (expected, cap)


def test_filters_raise_target_and_cap_by_the_kept_share() -> None:
    p = policy(depth=0.0, filtered=True, kept_share=0.5, rolling=63)
    assert p.room() == (True, 128)
    p.rolling = 64
    assert p.room() == (False, 128)
    p.kept_share = 0.01
    assert p.room() == (True, 128), "the share counts as 1/4 at least"
    p.rolling = 127
    assert p.room() == (True, 128)
    p.rolling = 128
    assert p.room() == (False, 128)


def test_kept_share_is_a_mean_over_about_two_batches() -> None:
    p = policy(batch_groups=4)
    for _ in range(8):
        p.outcome(False)
    assert p.kept_share == pytest.approx((7 / 8) ** 8)


def test_min_version_is_the_known_version_less_lag_and_never_below_the_last_resumed() -> None:
    p = policy(lag=2, version=5)
    assert p.min_version() == 3
    p.moved(6, 2, resumed=True)
    assert p.min_version() == 6


@pytest.mark.parametrize(("batch", "replay", "expected"), [(32, 0.0, 32), (32, 0.3, 22), (4, 0.9, 1), (1, 0.9, 1)])
def test_fresh_groups_of_a_batch(batch: int, replay: float, expected: int) -> None:
    assert fresh_groups(batch, replay) == expected


def test_whole_forgives_floating_point() -> None:
    assert whole(3 * 1.1 / 1.1) == 3
    assert whole(3.01) == 4


def test_a_credit_ends_with_its_first_ending() -> None:
    store, held = fresh_store(), Credits(make_config(), frozenset())
    opened(held, store, 2)
    p = held.policies[0]
    assert (p.rolling, p.kept, p.untrained) == (2, 0, 0)
    assert held.end(0, 0) is not None
    assert held.end(0, 0) is None
    assert held.settle(0, 0, KEPT) is None
    assert [x.group for x in held.batched(0, 1, [0, 1])] == [1]
    assert (p.rolling, p.kept, p.untrained) == (0, 0, 2), "a batch counts as it was composed"
    assert held.moved(0, 1, 1, resumed=False) == (True, [1])
    assert held.moved(0, 2, 1, resumed=False) == (False, [])
    assert not held.groups


def test_batches_to_be_trained_again_after_a_rollback_count_as_batched() -> None:
    store, held = fresh_store(), Credits(make_config(), frozenset())
    p = held.policies[0]
    for batch in (1, 2, 3):
        opened(held, store, 2)
        held.batched(0, batch, [2 * batch - 2, 2 * batch - 1])
        if batch < 3:
            held.moved(0, batch, batch, resumed=False)
    assert p.untrained == 2
    held.moved(0, 3, 1, resumed=True)
    assert p.untrained == 4
    assert p.stepped == 2, "credits that have ended do not come back"
    held.moved(0, 4, 2, resumed=False)
    assert p.untrained == 2


def test_watermark_is_below_the_oldest_open_group() -> None:
    store, held = fresh_store(), Credits(make_config(), frozenset())
    assert held.watermark() == -1
    opened(held, store, 3)
    held.end(1, 0)
    assert held.watermark() == -1
    held.end(0, 0)
    assert held.watermark() == 1
    held.end(2, 0)
    assert held.watermark() == 2


def test_a_group_lives_until_its_last_policy_has_ended() -> None:
    config = two_policies()
    store, held = fresh_store(), Credits(config, frozenset())
    opened(held, store, 1, (0, 1))
    first = held.end(0, 0)
    assert first is not None and first.states == {1: ROLLING}
    assert 0 in held.groups
    held.end(0, 1)
    assert not held.groups


def test_everything_comes_back_from_the_store() -> None:
    config = two_policies()
    memory = MemoryStore()
    store, held = StoreView(memory, b"s"), Credits(config, frozenset({0}))
    opened(held, store, 4, (0, 1))
    held.settle(0, 0, KEPT)
    held.batched(0, 1, [1, 2])
    held.end(3, 1)
    held.moved(1, 7, 3, resumed=True)
    held.policies[0].outcome(False)
    held.touch(0)
    held.groups[3].issued = 2
    held.flush(store)
    again = Credits(config, frozenset({0}))
    again.load(store)
    assert again.policies == held.policies
    assert again.groups == held.groups
    assert (again.next_group, again.rolling_groups) == (4, held.rolling_groups)
    assert again.moved(0, 1, 1, resumed=False) == (True, [1, 2])


def two_policies() -> RunConfig:
    return make_config(policies={"a": {"model": "none"}, "b": {"model": "none"}})


@pytest.mark.parametrize(("exact", "expected"), [(False, 8), (True, 2)])
def test_exact_refill_admits_one_group_for_each_that_was_dropped(exact: bool, expected: int) -> None:
    """At depth 0 with 2 groups a batch, after drops only: the cap without expectation is what the batch lacks."""
    base = make_config()
    main = next(iter(base.policies.values())).model_copy(update={"depth": 0.0, "exact_refill": exact})
    config = base.model_copy(
        update={
            "policies": dict.fromkeys(base.policies, main),
            "trainer": base.trainer.model_copy(update={"batch_groups": 2}),
        }
    )
    p = Credits(config, frozenset({0})).policies[0]
    for _ in range(100):
        p.outcome(False)
    while p.room()[0]:
        p.rolling += 1
    assert p.rolling == expected


def test_a_step_that_names_a_batch_out_of_all_reach_ends_what_there_is_and_is_not_counted_up_to() -> None:
    held, store = Credits(make_config(), frozenset()), fresh_store()
    opened(held, store, 3)
    held.batched(0, 1, [0, 2])
    assert held.moved(0, 1, 1 << 62, resumed=False) == (True, [0, 2])
    assert list(held.groups) == [1]
