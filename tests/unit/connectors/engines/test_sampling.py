"""Random numbers and choices: uniform, of the row alone, and of the distribution that is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.connectors.engines.sampling import choose, uniforms


def _choose(
    logits: np.ndarray, u: np.ndarray, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    n = len(u)
    return choose(
        torch.from_numpy(np.broadcast_to(logits, (n, logits.shape[-1])).copy()).float(),
        np.full(n, temperature, np.float32),
        np.full(n, top_p, np.float32),
        np.full(n, top_k, np.int32),
        u,
    )


def test_numbers_are_uniform_and_differ_by_seed_and_counter() -> None:
    seeds, counters = np.meshgrid(np.arange(300), np.arange(300))
    u = uniforms(seeds.ravel().astype(np.int64), counters.ravel().astype(np.int64))
    assert u.min() >= 0
    assert u.max() < 1
    assert np.unique(u).size > 0.9999 * u.size
    counts, _ = np.histogram(u, 100, (0, 1))
    chi2 = ((counts - u.size / 100) ** 2 / (u.size / 100)).sum()
    assert chi2 < 160, "99 degrees of freedom"
    grid = u.reshape(300, 300)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert (uniforms(np.array([-5]), np.array([2])) == uniforms(np.array([-5]), np.array([2]))).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_tempered_distribution_and_so_do_log_probs(temperature: float) -> None:
    logits = np.random.default_rng(1).normal(0, 2, 30)
    u = (np.arange(20_000) + 0.5) / 20_000
    tokens, logprobs = _choose(logits, u, temperature)
    scaled = logits / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    assert np.abs(np.bincount(tokens, minlength=30) / u.size - p).max() < 1e-3
    np.testing.assert_allclose(logprobs, np.log(p)[tokens], atol=1e-5)


def test_a_token_of_probability_0_is_never_chosen_not_even_at_the_ends() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf])
    ends = np.array([0.0, 0.5, 1 - 2.0**-32])
    assert _choose(logits, ends)[0].tolist() == [1, 3, 3]


def test_top_k_and_top_p_keep_the_likeliest_and_renormalise() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15]))
    u = (np.arange(1000) + 0.5) / 1000
    tokens, logprobs = _choose(logits, u, top_k=2)
    assert set(tokens.tolist()) == {1, 3}
    np.testing.assert_allclose(np.exp(logprobs[tokens == 1]), 0.4 / 0.7, rtol=1e-5)
    assert set(_choose(logits, u, top_p=0.6)[0].tolist()) == {1, 3}
    assert set(_choose(logits, u, top_p=0.75)[0].tolist()) == {1, 3, 4}
    assert set(_choose(logits, u, top_p=0.01)[0].tolist()) == {1}


def test_rows_of_different_parameters_share_a_batch() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.5]] * 3))
    tokens, logprobs = choose(
        logits,
        np.array([1, 0, 1], np.float32),
        np.array([1, 1, 1], np.float32),
        np.array([0, 0, 1], np.int32),
        np.array([0.05, 0.05, 0.05]),
    )
    assert tokens.tolist() == [0, 2, 2]
    np.testing.assert_allclose(np.exp(logprobs), [0.1, 0.5, 1.0], rtol=1e-5)


def test_logits_that_are_no_numbers_give_log_probs_that_are_none() -> None:
    tokens, logprobs = _choose(np.full(4, np.nan), np.array([0.5]))
    assert 0 <= tokens[0] < 4
    assert np.isnan(logprobs[0])
