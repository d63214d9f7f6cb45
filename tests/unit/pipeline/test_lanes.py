"""Batches laid out in lanes: whole groups, true counts, digests of what is written."""

from __future__ import annotations

from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st
from stage_feed import make_members

from headrace.pipeline.lanes import BatchGroup, lay_out
from headrace.schemas import codec
from headrace.schemas.digests import lane_digest
from headrace.schemas.records import Group, Item, Member


def taken(number: int, *tokens: int, use: int = 0) -> BatchGroup:
    *members, group = make_members(number, tokens=tokens)
    return BatchGroup(group=cast(Group, group), members=tuple(cast(Member, m) for m in members), use=use)


def test_items_say_what_members_and_group_say() -> None:
    laid = lay_out(0, 7, [taken(3, 2, 4, use=1)], [0], lanes=1)
    first, second = (e.item for e in laid.items)
    assert (first.batch, first.lane, first.index, first.use, first.group, first.replica) == (7, 0, 0, 1, 3, 0)
    assert (second.index, second.replica, second.length, second.raw_reward) == (1, 1, 4, 1.0)
    assert (first.group_mean, first.group_std, first.group_count) == (0.5, 0.7, 2)
    assert [(m.group, m.replica, m.use, m.lane) for m in laid.members] == [(3, 0, 1, 0), (3, 1, 1, 0)]
    assert (laid.tokens, laid.sequences) == (6, 2)


def test_members_that_are_not_trained_become_no_items() -> None:
    group = taken(0, 2, 2)
    object.__setattr__(group.members[1], "status", "baseline_only")
    laid = lay_out(0, 1, [group], [1], lanes=2)
    assert [(e.item.replica, e.item.lane) for e in laid.items] == [(0, 1)]


def test_an_empty_lane_is_listed_with_the_digest_of_nothing() -> None:
    laid = lay_out(0, 1, [taken(0, 2)], [0], lanes=3)
    assert [(lane.lane, lane.count, lane.tokens) for lane in laid.lanes] == [(0, 1, 2), (1, 0, 0), (2, 0, 0)]
    assert laid.lanes[1].digest == lane_digest([])


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=12),
    lanes=st.integers(1, 5),
)
def test_lanes_hold_whole_groups_with_true_counts_and_digests(sizes: list[list[int]], lanes: int) -> None:
    groups = [taken(number, *tokens) for number, tokens in enumerate(sizes)]
    given = [(3 * number) % lanes for number in range(len(groups))]
    laid = lay_out(0, 1, groups, given, lanes)
    by_lane: dict[int, list[tuple[Item, bytes]]] = {lane: [] for lane in range(lanes)}
    for encoded in laid.items:
        by_lane[encoded.item.lane].append((encoded.item, encoded.value))
    for lane in laid.lanes:
        here = by_lane[lane.lane]
        assert lane.count == len(here)
        assert lane.tokens == sum(item.length for item, _ in here)
        assert lane.digest == lane_digest(value for _, value in here)
        assert [item.index for item, _ in here] == list(range(len(here)))
        assert all(codec.encode(item) == value for item, value in here)
    assert all(item.lane == given[item.group] for items in by_lane.values() for item, _ in items)
    assert laid == lay_out(0, 1, groups, given, lanes), "the same groups, the same items"
