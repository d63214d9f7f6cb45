"""Figures of a batch: means over tokens and sequences, maxima, and what follows from them, whatever the split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rank_probe import manifest_of
from thread_ranks import on_ranks
from trainer_feed import make_items

from headrace.trainers.advantages.advantage import AdvantageOptions
from headrace.trainers.advantages.dr import GroupCentered
from headrace.trainers.batching import MicroBatch, pack, rows_of
from headrace.trainers.losses.loss import LossTerms
from headrace.trainers.ranks import Ranks
from headrace.trainers.tally import Tally, batch_metrics

ITEMS = make_items(1, groups=2, size=4, version=0, seed=0)
MICROS = pack(rows_of(ITEMS, GroupCentered(AdvantageOptions())), 20)


def terms_of(micro: MicroBatch) -> LossTerms:
    """Token ids as ratios, places as losses."""
    ids = torch.where(micro.mask, micro.tokens.double(), 0)
    rows = micro.mask.any(-1)
    return LossTerms(
        loss=ids,
        sums={"ratio/behave": ids.sum(), "ratio/behave_squared": (ids**2).sum(), "entropy": -ids.sum()},
        peaks={"ratio/max": ids.amax()},
        rows={"mismatch/training_ppl": ids.amax(-1)[rows].sum(), "mismatch/sequence_ratio_squared": 2.0 * rows.sum()},
    )


def tallied(micros: list[MicroBatch]) -> Tally:
    tally = Tally()
    for micro in micros:
        tally.count(micro)
        tally.add(torch.tensor(1.0), terms_of(micro), micro)
        tally.compare(micro.behave + 0.25 * micro.mask, micro, 0)
    return tally


def expected() -> dict[str, float]:
    ids = np.concatenate([item.sequences[0].tokens[item.sequences[0].mask == 1] for item in ITEMS]).astype(float)
    best = [float(item.sequences[0].tokens[item.sequences[0].mask == 1].max()) for item in ITEMS]
    return {
        "ratio/behave": ids.mean(), "entropy": -ids.mean(), "ratio/max": ids.max(),
        "ess": ids.mean() ** 2 / (ids**2).mean(), "chi2": (ids**2).mean() - 1,
        "mismatch/training_ppl": np.mean(best), "mismatch/sequence_chi2": 1.0,
        "mismatch/logprob_abs_mean": 0.25, "mismatch/logprob_abs_max": 0.25,
        "reward/mean": np.mean([item.shaped_reward for item in ITEMS]),
        "seq_len/max": max(item.length for item in ITEMS),
        "advantage/abs_mean": sum(abs(item.shaped_reward - item.group_mean) * item.length for item in ITEMS) / len(ids),
        "advantage/zero_fraction": 0.0, "advantage/singletons": 0.0,
    }  # fmt: skip


def test_figures_are_means_of_the_whole_batch() -> None:
    found = batch_metrics(tallied(MICROS), ITEMS, manifest_of(1, ITEMS), Ranks())
    for name, value in expected().items():
        assert found[name] == pytest.approx(value), name
    assert not any(name.startswith(("sum/", "row/", "count/")) or name.endswith("_squared") for name in found)


@pytest.mark.parametrize("ranks", [2, 3])
def test_figures_are_the_same_on_every_rank(ranks: int) -> None:
    def work(one: Ranks) -> dict[str, float]:
        items = [item for at, item in enumerate(ITEMS) if at % ranks == one.rank]
        micros = pack(rows_of(items, GroupCentered(AdvantageOptions())), 20)
        return batch_metrics(tallied(micros), items, manifest_of(1, ITEMS), one)

    found = on_ranks(ranks, work)
    assert all(other == found[0] for other in found)
    for name, value in expected().items():
        assert found[0][name] == pytest.approx(value), name


def test_exact_entropies_take_the_place_of_the_estimate() -> None:
    tally = Tally()
    for micro in MICROS:
        tally.count(micro)
        tally.add(torch.tensor(1.0), terms_of(micro), micro, torch.full(micro.mask.shape, 1.5))
    found = batch_metrics(tally, ITEMS, manifest_of(1, ITEMS), Ranks())
    assert found["entropy"] == pytest.approx(1.5)


def test_only_rows_of_the_present_version_are_compared() -> None:
    tally = Tally()
    tally.compare(MICROS[0].behave + 9.0, MICROS[0], 5)
    assert tally.mismatch == {}
    mixed = MICROS[0].versions.clone()
    mixed[0, MICROS[0].mask[0].nonzero()[0]] = 3
    older = MicroBatch(**{**{f: getattr(MICROS[0], f) for f in MicroBatch.__slots__}, "versions": mixed})  # type: ignore[attr-defined]
    tally.compare(older.behave + 1.0, older, 0)
    assert tally.mismatch["compared"] == float(older.mask[1:].sum())


def test_what_is_not_finite_is_left_out() -> None:
    tally = tallied(MICROS)
    tally.peaks["ratio/max"] = torch.tensor(float("inf"))
    found = batch_metrics(tally, [], manifest_of(1, []), Ranks())
    assert "ratio/max" not in found and found["reward/mean"] == 0.0
    assert batch_metrics(Tally(), [], manifest_of(1, []), Ranks())["ess"] == 0.0


def test_a_critics_error_is_told_as_explained_variance() -> None:
    tally = tallied(MICROS)
    n = tally.counts["tokens"]
    sums = {"critic/return": 2.0 * n, "critic/return_squared": 5.0 * n, "critic/error_squared": 0.25 * n}
    tally.sum_up({name: torch.tensor(value) for name, value in sums.items()})
    found = batch_metrics(tally, ITEMS, manifest_of(1, ITEMS), Ranks())
    assert found["critic/explained_variance"] == pytest.approx(0.75)
    assert "critic/return_squared" not in found
