"""A policy that is rewarded in several roles has its advantages by role, compared with the same role of its group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from trainer_feed import make_items

from headrace.schemas.parts import Reward, RoleStatistics
from headrace.schemas.records import Item
from headrace.trainers.advantages.advantage import AddUp, AdvantageOptions, GroupRewards, Needs, Scored, TokenAdvantages
from headrace.trainers.advantages.group import GroupNormalized, GroupNormalizedOptions
from headrace.trainers.advantages.normalized import BatchNormalized, NormalizedOptions
from headrace.trainers.batching import bare_rows, rows_of
from headrace.trainers.scoring import scored_rows
from headrace.trainers.shares import group_values, share_of, shares_of

ONE = make_items(1, groups=1, size=3, version=0, seed=0)


def played(at: int, solver: float, retry: float | None, *, shaping: float = 0.0) -> Item:
    """A member that solved and perhaps tried again; the statistics are those of ``ITEMS``."""
    (sequence,) = ONE[at].sequences
    roles = {"solver": solver} | ({"retry": retry} if retry is not None else {})
    raw = sum(roles.values()) / len(roles)
    return replace(
        ONE[at],
        raw_reward=raw,
        shaped_reward=raw + shaping,
        sequences=[replace(sequence, role=role) for role in roles],
        rewards=[Reward(name="mark", value=value, role=role) for role, value in roles.items()],
        group_roles=[
            RoleStatistics(role="solver", mean=0.25, std=0.5, count=3),
            RoleStatistics(role="retry", mean=0.5, std=0.5, count=2),
        ],
    )


ITEMS = [played(0, 0.0, 1.0), played(1, 1.0, None), played(2, 0.0, 0.0, shaping=-0.25)]
CENTERED: dict[tuple[int, str], float] = {
    (0, "solver"): -0.25, (0, "retry"): 0.5, (1, "solver"): 0.75, (2, "solver"): -0.5, (2, "retry"): -0.75,
}  # fmt: skip


def centered(group: GroupRewards) -> list[float]:
    return [reward - group.mean for reward in group.rewards]


def test_each_role_is_compared_with_its_own_statistics() -> None:
    assert group_values(ITEMS, centered) == CENTERED
    seen: list[GroupRewards] = []
    group_values(ITEMS, lambda group: (seen.append(group), [0.0] * len(group.rewards))[1])
    assert [(g.mean, g.std, g.count, g.rewards) for g in seen] == [
        (0.25, 0.5, 3, [0.0, 1.0, -0.25]), (0.5, 0.5, 2, [1.0, -0.25])
    ]  # fmt: skip
    lengths = [int(item.sequences[0].mask.sum()) for item in ITEMS]
    assert [g.lengths for g in seen] == [lengths, [lengths[0], lengths[2]]]
    assert seen[0].parts == [{"mark": 0.0}, {"mark": 1.0}, {"mark": 0.0}]


def test_every_token_of_a_role_gets_the_roles_advantage() -> None:
    for rows in (rows_of(ITEMS, centered), scored_rows(ITEMS, bare_rows(ITEMS), centered, dict)):
        found = {(row.item, row.role): set(row.advantages[row.mask].tolist()) for row in rows}
        assert found == {key: {np.float32(value)} for key, value in CENTERED.items()}
        assert not any(row.advantages[~row.mask].any() for row in rows)
        assert all(len(row.group) == 2 for row in rows), "updates are split by whole groups, not by roles"


def test_an_advantage_of_the_batch_sees_roles_as_members_of_their_own() -> None:
    class Seen:
        Options = AdvantageOptions
        needs = Needs()
        members: ClassVar[list[Scored]] = []

        def of_batch(self, members: Any, add_up: AddUp) -> list[TokenAdvantages]:
            self.members.extend(members)
            return [TokenAdvantages(advantages=[np.where(mask, m.reward, 0.0) for mask in m.masks]) for m in members]

    seen = Seen()
    rows = scored_rows(ITEMS, bare_rows(ITEMS), seen, dict)
    told = [(m.group, m.reward, m.mean, m.count, m.roles) for m in seen.members]
    key = (ITEMS[0].group, 0)
    assert told == [
        ((*key, "solver"), 0.0, 0.25, 3, ["solver"]),
        ((*key, "retry"), 1.0, 0.5, 2, ["retry"]),
        ((*key, "solver"), 1.0, 0.25, 3, ["solver"]),
        ((*key, "solver"), -0.25, 0.25, 3, ["solver"]),
        ((*key, "retry"), -0.25, 0.5, 2, ["retry"]),
    ]
    assert [row.advantages[row.mask][0] for row in rows] == [0.0, 1.0, 1.0, -0.25, -0.25]


def test_batch_statistics_count_every_role_once() -> None:
    rows = scored_rows(ITEMS, bare_rows(ITEMS), BatchNormalized(NormalizedOptions(std="none")), dict)
    mean = (3 * 0.25 + 2 * 0.5) / 5
    assert rows[0].advantages[rows[0].mask][0] == pytest.approx(0.0 - mean)


def test_a_role_that_only_one_member_played_teaches_nothing() -> None:
    alone = [replace(item, group_roles=[item.group_roles[0], replace(item.group_roles[1], count=1)]) for item in ITEMS]
    values = group_values(alone[:1], GroupNormalized(GroupNormalizedOptions()))
    assert values[0, "retry"] == 0.0 and values[0, "solver"] != 0.0


def test_without_statistics_by_role_an_item_is_one_share() -> None:
    whole = [replace(item, group_roles=[]) for item in ITEMS]
    assert [(s.item, s.role, s.reward, s.mean) for s in shares_of(whole)] == [
        (at, "", item.shaped_reward, item.group_mean) for at, item in enumerate(whole)
    ]


def test_a_sequence_whose_role_earned_nothing_of_its_own_has_the_members_share() -> None:
    (sequence,) = ONE[0].sequences
    item = replace(ITEMS[0], sequences=[*ITEMS[0].sequences, replace(sequence, role="note")])
    assert [share_of(item, role) for role in ("solver", "retry", "note")] == ["solver", "retry", ""]
    assert [(s.role, s.reward) for s in shares_of([item])] == [("solver", 0.0), ("retry", 1.0), ("", 0.5)]


def test_turns_of_a_role_belong_to_it() -> None:
    turns = [Reward(name="step", value=0.5, role="solver", turn=0), Reward(name="step", value=0.25, turn=1)]
    item = replace(ITEMS[0], rewards=[*ITEMS[0].rewards, *turns])
    assert [s.turns for s in shares_of([item])] == [{0: 0.5, 1: 0.25}, {1: 0.25}]


def test_what_is_not_trainable_makes_no_share() -> None:
    first, second = ITEMS[0].sequences
    item = replace(ITEMS[0], sequences=[first, replace(second, trainable=False)])
    assert [s.role for s in shares_of([item])] == ["solver"]
