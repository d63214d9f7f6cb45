"""Means and deviations of the batch: over every member that counts, and the same on any count of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import on_ranks

from headrace.trainers.advantages.advantage import Scored
from headrace.trainers.advantages.gpg import GPG, GPGOptions
from headrace.trainers.advantages.normalized import BatchNormalized, MixedNormalized, MixedOptions, NormalizedOptions

GROUPS = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0, 2.5]), min_size=1, max_size=5), min_size=1, max_size=6)
MODES = st.sampled_from(["none", "batch", "group"])


def members_of(groups: list[list[float]], trained: int = 99) -> list[Scored]:
    """The first ``trained`` members of each group."""
    out = []
    for number, rewards in enumerate(groups):
        std = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
        out += [
            Scored(
                group=(number, 0), reward=r, mean=float(np.mean(rewards)), std=std, count=len(rewards),
                masks=[np.ones(2, bool)], roles=["policy"],
            )
            for r in rewards[:trained]
        ]  # fmt: skip
    return out


def values(advantage: BatchNormalized, members: list[Scored], add_up: Any = dict) -> list[float]:
    return [float(part.advantages[0][0]) for part in advantage.of_batch(members, add_up)]


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, mean=MODES, std=MODES, spread=st.sampled_from(["rewards", "residuals"]), out=st.booleans())
def test_values_are_finite_and_do_not_depend_on_who_is_trained(
    groups: list[list[float]], mean: Any, std: Any, spread: Any, out: bool
) -> None:
    advantage = BatchNormalized(NormalizedOptions(mean=mean, std=std, spread=spread, leave_one_out=out))
    whole = values(advantage, members_of(groups))
    assert np.isfinite(whole).all() and max(map(abs, whole)) < 20
    first = values(advantage, members_of(groups, trained=1))
    starts = np.cumsum([0, *(len(g) for g in groups)])[:-1]
    assert first == pytest.approx([whole[at] for at in starts])


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS)
def test_batch_figures_are_those_of_all_rewards(groups: list[list[float]]) -> None:
    flat = np.concatenate(groups)
    if len(flat) < 2 or flat.std() == 0:
        assert values(BatchNormalized(NormalizedOptions()), members_of(groups)) == pytest.approx([0.0] * len(flat))
        return
    wanted = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-6)
    assert values(BatchNormalized(NormalizedOptions()), members_of(groups)) == pytest.approx(list(wanted))


def test_mixed_takes_the_groups_mean_and_the_batchs_deviation() -> None:
    groups = [[1.0, 0.0], [0.5, 0.5, 2.0]]
    flat = np.concatenate(groups)
    wanted = np.concatenate([np.array(g) - np.mean(g) for g in groups]) / (flat.std(ddof=1) + 1e-6)
    assert values(MixedNormalized(MixedOptions()), members_of(groups)) == pytest.approx(list(wanted))


@settings(max_examples=15, deadline=None)
@given(groups=GROUPS, mean=MODES, std=MODES, ranks=st.integers(2, 3), data=st.data())
def test_ranks_together_give_what_one_gives(
    groups: list[list[float]], mean: Any, std: Any, ranks: int, data: st.DataObject
) -> None:
    """Whole groups lie on one rank; a rank may have none."""
    owner = [data.draw(st.integers(0, ranks - 1)) for _ in groups]
    for advantage in (BatchNormalized(NormalizedOptions(mean=mean, std=std, spread="residuals")), GPG(GPGOptions())):
        members = members_of(groups)
        wanted = [float(part.advantages[0][0]) for part in advantage.of_batch(members, dict)]
        shares = [[at for at, m in enumerate(members) if owner[m.group[0]] == rank] for rank in range(ranks)]
        taken = [[members[at] for at in share] for share in shares]
        parts = on_ranks(ranks, lambda r, a=advantage, t=taken: a.of_batch(t[r.rank], r.add_up))
        for share, found in zip(shares, parts, strict=True):
            assert [float(p.advantages[0][0]) for p in found] == pytest.approx([wanted[at] for at in share], abs=1e-9)


def test_gpg_scales_up_by_the_share_of_the_batch_without_a_reward() -> None:
    found = GPG(GPGOptions()).of_batch(members_of([[1.0, 0.0], [0.0, 0.0]]), dict)
    assert [float(p.advantages[0][0]) for p in found] == [2.0, -2.0, 0.0, 0.0]
