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
from headrace.trainers.losses.loss import Loss, Streams, Surveying, configured

LOSSES = {
    name: configured(load("headrace.losses", name), {}, "trainer.loss_options")
    for name in sorted(installed("headrace.losses"))
}


def rewards(group: GroupRewards) -> list[float]:
    return [reward - group.mean for reward in group.rewards]


ITEMS = make_items(1, groups=4, size=3, version=0, seed=0)


def test_each_sequence_gets_the_advantage_of_its_trajectory() -> None:
    two = [replace(item, sequences=[*item.sequences, *item.sequences]) for item in ITEMS]
    rows = rows_of(two, rewards)
    assert len(rows) == 2 * len(ITEMS)
    for at, item in enumerate(two):
        for row in rows[2 * at : 2 * at + 2]:
            assert set(row.advantages[row.mask]) == {np.float32(item.shaped_reward - item.group_mean)}
            assert not row.advantages[~row.mask].any()


def test_untrainable_sequences_are_left_out() -> None:
    first = replace(ITEMS[0], sequences=[replace(ITEMS[0].sequences[0], trainable=False)])
    assert len(rows_of([first, *ITEMS[1:]], rewards)) == len(ITEMS) - 1


def test_a_replayed_group_is_a_group_of_its_own() -> None:
    again = [replace(item, use=1, shaped_reward=5.0, group_mean=5.0) for item in ITEMS[:3]]
    rows = rows_of([*ITEMS[:3], *again], rewards)
    assert not any(row.advantages.any() for row in rows[3:])
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
    assert all(int(micro.lengths.sum()) <= 24 for micro in micros)
    for micro in micros:
        for at, i in enumerate(micro.rows):
            n = rows[i].tokens.size
            assert micro.tokens[at, :n].tolist() == rows[i].tokens.tolist()
            assert micro.mask[at].sum() == rows[i].trained
            assert not micro.mask[at, n:].any()
            assert micro.advantages[at, :n].tolist() == rows[i].advantages.tolist()


def test_a_row_over_the_budget_goes_alone() -> None:
    rows = rows_of(ITEMS, rewards)
    assert [len(micro.rows) for micro in pack(rows, 1)] == [1] * len(rows)
    assert pack([], 10) == []


def test_a_dummy_trains_nothing() -> None:
    assert not dummy().mask.any()
    assert count_rows([]) == {"tokens": 0.0, "sequences": 0.0, "units": 0.0}
    assert count_rows(rows_of(ITEMS, rewards))["sequences"] == len(ITEMS)


def test_a_trajectory_of_thirty_sequences_weighs_one_or_thirty() -> None:
    """Two trajectories, one of 30 sequences: by trajectory each has half of the weight, by sequence it has 30 of 31."""
    many, one = ITEMS[0], ITEMS[1]
    items = [replace(many, sequences=many.sequences * 30), one]
    for by_trajectory, share in ((True, 1 / 2), (False, 30 / 31)):
        rows = rows_of(items, rewards, by_trajectory=by_trajectory)
        counts = count_rows(rows, by_trajectory=by_trajectory)
        fixed = Denominators(tokens=int(counts["tokens"]), sequences=int(counts["units"]), constant=12)
        assert fixed.sequences == (2 if by_trajectory else 31)
        for budget in (1, 50, 10_000):
            found = 0.0
            for micro in pack(rows, budget):
                mine = torch.tensor([float(rows[i].item == 0) for i in micro.rows])[:, None]
                loss = mine.expand(micro.mask.shape)
                found += float(aggregate(loss, micro.mask, "seq-mean-token-mean", fixed, micro.unit_tokens))
            assert found == pytest.approx(share)
    tokens = many.length * 30 / (many.length * 30 + one.length)
    rows = rows_of(items, rewards)
    (micro,) = pack(rows, 10_000)
    mine = torch.tensor([float(rows[i].item == 0) for i in micro.rows])[:, None].expand(micro.mask.shape)
    counts = Denominators(tokens=int(count_rows(rows)["tokens"]), sequences=2, constant=12)
    assert float(aggregate(mine, micro.mask, "token-mean", counts)) == pytest.approx(tokens), "by its tokens"


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
                advantages=np.full(length, rng.normal(), np.float32),
                item=at,
                unit_tokens=int(mask.sum()),
                reward=float(at % 2),
            )
        )
    return rows


def new_logprobs(micro: MicroBatch) -> torch.Tensor:
    """What a model gives that looks at each row alone: depends on tokens and places, not on neighbours or padding."""
    places = torch.arange(micro.tokens.shape[1], dtype=torch.float64)
    return -1.0 - 0.03 * micro.tokens.double() - 0.01 * places


def streams_of(micro: MicroBatch) -> Streams:
    new = new_logprobs(micro)
    return Streams(
        new=new, prox=new - 0.1, behave=micro.behave.double(), advantages=micro.advantages.double(),
        mask=micro.mask, ref=new + 0.2, rewards=micro.rewards.double(),
    )  # fmt: skip


def total_loss(rows: list[Row], budget: int, loss: Loss, mode: Mode) -> float:
    counts = count_rows(rows)
    fixed = Denominators(tokens=int(counts["tokens"]), sequences=int(counts["sequences"]), constant=12)
    micros = pack(rows, budget) or [dummy()]
    if isinstance(loss, Surveying) and loss.surveys:
        found = [loss.survey(streams_of(micro)) for micro in micros]
        loss = loss.fitted({name: torch.cat([survey[name] for survey in found]) for name in found[0]})
    return sum(float(aggregate(loss(streams_of(m)).loss, m.mask, mode, fixed, m.unit_tokens)) for m in micros)


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
def test_packing_keeps_the_budget_wastes_little_and_loses_no_trained_row(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    rows = made_rows(lengths)
    micros = pack(rows, budget)
    assert sorted(i for micro in micros for i in micro.rows) == [i for i, row in enumerate(rows) if row.trained]
    for micro in micros:
        assert len(micro.rows) == 1 or sum(len(rows[i].tokens) for i in micro.rows) <= budget
        assert micro.lengths.tolist() == [len(rows[i].tokens) for i in micro.rows]
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
