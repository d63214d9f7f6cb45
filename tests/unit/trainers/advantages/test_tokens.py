"""Returns, GAE and whitening: their definitions, and that ranks together give what one gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import on_ranks

from headrace.trainers.advantages.tokens import discounted, generalized, whitened

ARRAYS = st.lists(st.lists(st.floats(-9, 9, width=32), max_size=6), max_size=7)


@settings(max_examples=60, deadline=None)
@given(rewards=st.lists(st.floats(-5, 5), max_size=8), gamma=st.floats(0, 1))
def test_returns_are_the_discounted_sum_of_what_follows(rewards: list[float], gamma: float) -> None:
    found = discounted(np.array(rewards), gamma)
    for at in range(len(rewards)):
        wanted = sum(gamma ** (later - at) * rewards[later] for later in range(at, len(rewards)))
        assert found[at] == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=8),
    gamma=st.floats(0, 1), lam=st.floats(0, 1),
)  # fmt: skip
def test_gae_goes_from_one_step_to_the_whole_return(pairs: list[tuple[float, float]], gamma: float, lam: float) -> None:
    rewards, values = np.array(pairs).T
    after = np.append(values[1:], 0.0)
    assert np.allclose(generalized(rewards, values, gamma, 0.0), rewards + gamma * after - values)
    assert np.allclose(generalized(rewards, values, gamma, 1.0), discounted(rewards, gamma) - values)
    deltas = rewards + gamma * after - values
    assert np.allclose(generalized(rewards, values, gamma, lam), discounted(deltas, gamma * lam))


@settings(max_examples=60, deadline=None)
@given(arrays=ARRAYS)
def test_whitened_tokens_have_mean_zero_and_deviation_one(arrays: list[list[float]]) -> None:
    given = [np.array(a) for a in arrays]
    found = np.concatenate([*whitened(given, dict, 0.0), np.zeros(0)])
    flat = np.concatenate([*given, np.zeros(0)])
    if len(flat) < 2 or flat.std() < 1e-6:
        assert np.isfinite(found).all()
        return
    assert found.mean() == pytest.approx(0, abs=1e-6) and found.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_equal_tokens_one_token_and_none_give_zeros() -> None:
    assert not np.concatenate(whitened([np.full(3, 0.1), np.full(5, 0.1)], dict, 1e-8)).any()
    assert not whitened([np.array([3.0])], dict, 1e-8)[0].any()
    assert whitened([], dict, 1e-8) == []


@settings(max_examples=15, deadline=None)
@given(arrays=ARRAYS, ranks=st.integers(1, 3), data=st.data())
def test_ranks_together_whiten_as_one_does(arrays: list[list[float]], ranks: int, data: st.DataObject) -> None:
    """Also when a rank has nothing."""
    given = [np.array(a) for a in arrays]
    owner = [data.draw(st.integers(0, ranks - 1)) for _ in given]
    wanted = whitened(given, dict, 1e-8)
    found = on_ranks(
        ranks,
        lambda r: whitened([a for a, o in zip(given, owner, strict=True) if o == r.rank], r.add_up, 1e-8),
    )
    for rank in range(ranks):
        mine = [w for w, o in zip(wanted, owner, strict=True) if o == rank]
        for a, b in zip(found[rank], mine, strict=True):
            assert np.allclose(a, b, rtol=1e-9, atol=1e-9)
