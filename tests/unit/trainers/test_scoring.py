"""From items and rows to advantages per token, with values and returns where the advantage asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from trainer_feed import make_items

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Reward
from headrace.trainers.advantages.advantage import AddUp, AdvantageOptions, Needs, Scored, TokenAdvantages
from headrace.trainers.advantages.dr import GroupCentered
from headrace.trainers.advantages.gae import GAE, GAEOptions
from headrace.trainers.advantages.remax import ReMax, ReMaxOptions
from headrace.trainers.batching import bare_rows, pack
from headrace.trainers.scoring import by_row, needs_of, scored_rows

ITEMS = make_items(1, groups=2, size=3, version=0, seed=0)


class Seen:
    """An advantage that keeps what it was given, and numbers the tokens of every trajectory."""

    Options: ClassVar[type[AdvantageOptions]] = AdvantageOptions
    needs = Needs(values=True, kl="k1")

    def __init__(self) -> None:
        self.members: Sequence[Scored] = []

    def of_batch(self, members: Sequence[Scored], add_up: AddUp) -> list[TokenAdvantages]:
        self.members = members
        return [
            TokenAdvantages(
                advantages=[np.where(mask, at + 1.0, 0.0) for at, mask in enumerate(m.masks)],
                returns=[np.where(mask, -at - 1.0, 0.0) for at, mask in enumerate(m.masks)],
            )
            for m in members
        ]


def test_group_advantages_stand_on_trained_tokens_only() -> None:
    rows = scored_rows(ITEMS, bare_rows(ITEMS), GroupCentered(AdvantageOptions()), dict)
    for row in rows:
        item = ITEMS[row.item]
        assert set(row.advantages[row.mask]) == {np.float32(item.shaped_reward - item.group_mean)}
        assert not row.advantages[~row.mask].any() and row.advantages.dtype == np.float32
        assert row.values is None and row.returns is None


def test_what_an_advantage_of_the_batch_is_given_and_where_its_values_go() -> None:
    first = ITEMS[0].sequences[0]
    items = [
        replace(
            ITEMS[0],
            sequences=[first, replace(first, trainable=False), replace(first, role="critic")],
            rewards=[
                Reward(name="a", value=0.5, turn=0),
                Reward(name="b", value=0.25, turn=0),
                Reward(name="c", value=9),
            ],
        ),
        *ITEMS[1:],
    ]
    rows = bare_rows(items)
    arrays = [np.full(len(row.tokens), at, np.float32) for at, row in enumerate(rows)]
    seen = Seen()
    scored = scored_rows(items, rows, seen, dict, values=arrays, kl=[a + 100 for a in arrays])
    one = seen.members[0]
    assert len(seen.members) == len(items) and len(one.masks) == 2, "what is not trainable is left out"
    assert one.roles == ["policy", "critic"] and one.turn_rewards == {0: 0.75}
    assert (one.reward, one.mean, one.count) == (items[0].shaped_reward, items[0].group_mean, items[0].group_count)
    assert [v[0] for v in one.values] == [0.0, 1.0] and [v[0] for v in one.kl] == [100.0, 101.0]
    assert [row.advantages[row.mask][0] for row in scored[:3]] == [1.0, 2.0, 1.0]
    assert [row.returns[row.mask][0] for row in scored[:3] if row.returns is not None] == [-1.0, -2.0, -1.0]
    assert all(row.values is array for row, array in zip(scored, arrays, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_advantage_that_is_not_finite_is_named(value: float) -> None:
    with pytest.raises(ConfigurationError, match=r"function gave (nan|inf) for group 1000, replica 1 \(reward"):
        scored_rows(ITEMS, bare_rows(ITEMS), lambda group: [0.0, value, 0.0][: len(group.rewards)], dict)


def test_parts_of_the_reward_reach_advantages_of_groups() -> None:
    items = [replace(item, rewards=[Reward(name="greedy", value=0.25)]) for item in ITEMS]
    rows = scored_rows(items, bare_rows(items), ReMax(ReMaxOptions()), dict)
    assert all(row.advantages[row.mask][0] == items[row.item].shaped_reward - 0.25 for row in rows)


def test_what_is_needed_is_asked_of_the_advantage() -> None:
    assert needs_of(GroupCentered(AdvantageOptions())) == Needs()
    assert needs_of(GAE(GAEOptions(kl_weight=0.1, kl="k3"))) == Needs(values=True, kl="k3")


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_outputs_of_micro_batches_come_back_by_row_without_padding(budget: int) -> None:
    rows = bare_rows(ITEMS)
    micros = pack(rows, budget)
    outputs: list[Any] = [micro.tokens.double() for micro in micros]
    found = by_row(micros, outputs, rows)
    assert [a.tolist() for a in found] == [row.tokens.tolist() for row in rows]
    assert [a.tolist() for a in by_row([], [], rows[:2])] == [[0.0] * len(row.tokens) for row in rows[:2]]
    assert torch.is_tensor(outputs[0])
