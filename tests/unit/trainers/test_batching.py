"""Rows, updates and micro-batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_feed import make_items

from headrace.connectors.plugins import installed, load
from headrace.trainers.advantages.advantage import GroupRewards
from headrace.trainers.batching import MicroBatch, Row, count_rows, dummy, pack, rows_of, split_updates
from headrace.trainers.losses.aggregation import MODES, Denominators, Mode, aggregate
from headrace.trainers.losses.loss import Loss, Streams, configured

PER_MICRO_BATCH = {"m2po"}
"""Losses that say that they look at a micro-batch as a whole."""
LOSSES = {
    name: configured(load("headrace.losses", name), {}, "trainer.loss_options")
    for name in sorted(set(installed("headrace.losses")) - PER_MICRO_BATCH)
}


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


LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=12)


def made_rows(lengths: list[tuple[int, int]]) -> list[Row]:
    """Rows of (length, trained tokens at the end) in groups of two."""
    rng = np.random.default_rng(len(lengths))
    rows = []
    for at, (length, trained) in enumerate(lengths):
        mask = np.zeros(length, bool)
        mask[max(1, length - trained) :] = True
        rows.append(
            Row(
                group=(at // 2, 0),
                tokens=rng.integers(0, 20, length).astype(np.int32),
                behave=rng.normal(-1, 0.3, length).astype(np.float32),
                mask=mask,
                versions=np.where(mask, 3, -1).astype(np.int32),
                advantage=float(rng.normal()),
                reward=float(at % 2),
            )
        )
    return rows


def new_logprobs(micro: MicroBatch) -> torch.Tensor:
    """What a model gives that looks at each row alone: depends on tokens and places, not on neighbours or padding."""
    places = torch.arange(micro.tokens.shape[1], dtype=torch.float64)
    return -1.0 - 0.03 * micro.tokens.double() - 0.01 * places


def total_loss(rows: list[Row], budget: int, loss: Loss, mode: Mode) -> float:
    counts = count_rows(rows)
    fixed = Denominators(tokens=int(counts["tokens"]), sequences=int(counts["sequences"]), constant=12)
    total = 0.0
    for micro in pack(rows, budget):
        new = new_logprobs(micro)
        streams = Streams(
            new=new, prox=new - 0.1, behave=micro.behave.double(), advantages=micro.advantages.double(),
            mask=micro.mask, ref=new + 0.2, rewards=micro.rewards.double(),
        )  # fmt: skip
        total += float(aggregate(loss(streams).loss, micro.mask, mode, fixed))
    return total


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 60), mode=st.sampled_from(MODES), name=st.sampled_from(sorted(LOSSES)))
def test_a_loss_does_not_depend_on_how_a_batch_is_packed(
    lengths: list[tuple[int, int]], budget: int, mode: Mode, name: str
) -> None:
    rows = made_rows(lengths)
    alone, packed, whole = (total_loss(rows, b, LOSSES[name], mode) for b in (1, budget, 1000))
    assert packed == pytest.approx(alone, abs=1e-9)
    assert whole == pytest.approx(alone, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 60))
def test_packing_keeps_the_budget_wastes_little_and_loses_no_row(lengths: list[tuple[int, int]], budget: int) -> None:
    rows = made_rows(lengths)
    micros = pack(rows, budget)
    assert sorted(i for micro in micros for i in micro.rows) == list(range(len(rows)))
    for micro in micros:
        assert len(micro.rows) == 1 or len(micro.rows) * max(len(rows[i].tokens) for i in micro.rows) <= budget
        assert int(micro.mask.sum()) == sum(rows[i].trained for i in micro.rows)
        assert micro.tokens.shape[1] == max(2, *(len(rows[i].tokens) for i in micro.rows))
    longest = [max(len(rows[i].tokens) for i in micro.rows) for micro in micros]
    assert longest == sorted(longest), "rows of similar length go together"


@settings(max_examples=40, deadline=None)
@given(groups=st.lists(st.integers(1, 4), min_size=1, max_size=9), updates=st.integers(1, 12), ranks=st.integers(1, 3))
def test_every_rank_splits_a_batch_into_the_same_groups(groups: list[int], updates: int, ranks: int) -> None:
    keys = [(number, 0) for number, size in enumerate(groups) for _ in range(size)]
    rows = [replace(row, group=key) for row, key in zip(made_rows([(3, 2)] * len(keys)), keys, strict=True)]
    part_of: dict[tuple[int, int], set[int]] = {}
    seen = 0
    for rank in range(ranks):
        mine = [row for row in rows if row.group[0] % ranks == rank]
        parts = split_updates(mine, updates, set(keys))
        assert len(parts) == updates
        for number, part in enumerate(parts):
            seen += len(part)
            for row in part:
                part_of.setdefault(row.group, set()).add(number)
    assert seen == len(rows)
    assert all(len(numbers) == 1 for numbers in part_of.values()), "whole groups, whatever rank they are on"
    sizes = [sum(1 for numbers in part_of.values() if number in numbers) for number in range(updates)]
    assert max(sizes) - min(sizes) <= 1


def test_moving_to_the_device_it_is_on_copies_nothing() -> None:
    (micro,) = pack(made_rows([(4, 2)]), 100)
    assert micro.to(torch.device("cpu")) is micro
    moved = micro.to(torch.device("meta"))
    assert moved.rows == micro.rows and moved.tokens.device.type == "meta"
    assert {t.device.type for t in (moved.behave, moved.mask, moved.versions, moved.advantages, moved.rewards)} == {
        "meta"
    }
