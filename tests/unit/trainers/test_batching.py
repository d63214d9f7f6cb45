"""Rows, updates and micro-batches."""

from dataclasses import replace

import numpy as np
from trainer_feed import make_items

from headrace.trainers.advantages.advantage import GroupRewards
from headrace.trainers.batching import count_rows, dummy, pack, rows_of, split_updates


def rewards(group: GroupRewards) -> list[float]:
    return [reward - group.mean for reward in group.rewards]


ITEMS = make_items(1, groups=4, size=3, version=0, seed=0)


def test_each_sequence_gets_the_advantage_of_its_trajectory() -> None:
    two = [replace(item, sequences=[*item.sequences, *item.sequences]) for item in ITEMS]
    rows = rows_of(two, rewards)
    assert len(rows) == 2 * len(ITEMS)
    for at, item in enumerate(two):
        assert rows[2 * at].advantage == rows[2 * at + 1].advantage == item.shaped_reward - item.group_mean


def test_untrainable_sequences_are_left_out() -> None:
    first = replace(ITEMS[0], sequences=[replace(ITEMS[0].sequences[0], trainable=False)])
    assert len(rows_of([first, *ITEMS[1:]], rewards)) == len(ITEMS) - 1


def test_a_replayed_group_is_a_group_of_its_own() -> None:
    again = [replace(item, use=1, shaped_reward=5.0, group_mean=5.0) for item in ITEMS[:3]]
    rows = rows_of([*ITEMS[:3], *again], rewards)
    assert [row.advantage for row in rows[3:]] == [0.0, 0.0, 0.0]
    assert {row.group for row in rows} == {(1000, 0), (1000, 1)}


def test_the_first_token_is_never_trained() -> None:
    sequence = ITEMS[0].sequences[0]
    whole = replace(sequence, mask=np.ones(sequence.tokens.size, np.uint8))
    (row,) = rows_of([replace(ITEMS[0], sequences=[whole])], rewards)
    assert not row.mask[0]
    assert row.trained == sequence.tokens.size - 1


def test_updates_hold_whole_groups() -> None:
    rows = rows_of(ITEMS, rewards)
    groups = {row.group for row in rows}
    parts = split_updates(rows, 3, groups)
    assert sum(len(part) for part in parts) == len(rows)
    assert [len({row.group for row in part}) for part in parts] == [2, 1, 1]
    assert split_updates(rows, 1, groups) == [rows]
    assert [len(part) for part in split_updates(rows[:3], 2, groups)] == [3, 0]
    assert [len(part) for part in split_updates(rows[9:], 2, groups)] == [0, 3]


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    rows = rows_of(ITEMS, rewards)
    micros = pack(rows, 24)
    assert sorted(i for micro in micros for i in micro.rows) == list(range(len(rows)))
    assert all(micro.tokens.numel() <= 24 for micro in micros)
    for micro in micros:
        for at, i in enumerate(micro.rows):
            n = rows[i].tokens.size
            assert micro.tokens[at, :n].tolist() == rows[i].tokens.tolist()
            assert micro.mask[at].sum() == rows[i].trained
            assert not micro.mask[at, n:].any()
            assert micro.advantages[at].unique().tolist() == [np.float32(rows[i].advantage)]


def test_a_row_over_the_budget_goes_alone() -> None:
    rows = rows_of(ITEMS, rewards)
    assert [len(micro.rows) for micro in pack(rows, 1)] == [1] * len(rows)
    assert pack([], 10) == []


def test_a_dummy_trains_nothing() -> None:
    assert not dummy().mask.any()
    assert count_rows([]) == {"tokens": 0.0, "sequences": 0.0}
    assert count_rows(rows_of(ITEMS, rewards))["sequences"] == len(ITEMS)
