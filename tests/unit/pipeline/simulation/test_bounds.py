"""The propositions' bounds: their worked values, the exact minimiser, and that list scheduling never passes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline.simulation.baselines import list_schedule
from headrace.pipeline.simulation.bounds import balanced, rollout_bound, step_bound, synchronous_bound

WORKED = [
    # N, K, mean, L, work, alpha: synchronous, share, balanced
    ((256, 40, 30.0, 300.0, 10.0, 2.0), 556.0, 0.189906, 337.009434),
    ((64, 16, 100.0, 800.0, 50.0, 1.0), 1400.0, 0.219224, 912.310563),
    ((512, 128, 20.0, 200.0, 2.5, 0.5), 290.0, None, None),
]


@pytest.mark.parametrize(("given_", "synchronous", "share", "seconds"), WORKED[:2])
def test_worked_values(given_: tuple[float, ...], synchronous: float, share: float, seconds: float) -> None:
    n, k, mean, longest, work, alpha = given_
    assert synchronous_bound(int(n), int(k), mean, longest, work) == pytest.approx(synchronous)
    found = balanced(int(n), int(k), mean, longest, work, alpha)
    assert found.share == pytest.approx(share, abs=5e-7)
    assert found.seconds == pytest.approx(seconds, abs=5e-7)


def test_two_epochs_at_half_a_batch_ahead() -> None:
    """E = 2 epochs of 5 machine seconds each."""
    assert synchronous_bound(512, 128, 20.0, 200.0, 10.0) == pytest.approx(320.0)
    found = balanced(512, 128, 20.0, 200.0, 10.0, 0.5)
    assert (found.share, found.seconds) == (pytest.approx(0.173791, abs=5e-7), pytest.approx(230.161165, abs=5e-7))


CASES = {
    "n": st.integers(1, 600), "k": st.integers(1, 200), "mean": st.floats(0.1, 100), "more": st.floats(0, 900),
    "work": st.floats(0.01, 100), "alpha": st.floats(0, 8),
}  # fmt: skip


@given(**CASES)
def test_no_other_split_is_better_and_it_beats_the_plain_bound(
    n: int, k: int, mean: float, more: float, work: float, alpha: float
) -> None:
    longest = mean + more
    best = balanced(n, k, mean, longest, work, alpha)
    assert 0 < best.share < 1
    assert step_bound(n, k, mean, longest, work, alpha=alpha, share=best.share) == pytest.approx(best.seconds, rel=1e-6)
    for share in (best.share * 0.9, min(0.999, best.share * 1.1), 0.5):
        assert step_bound(n, k, mean, longest, work, alpha=alpha, share=share) >= best.seconds * (1 - 1e-9)
    assert best.seconds <= (n * mean + n * work) / k + longest / (alpha + 1) + 1e-6 * best.seconds


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.floats(0, 50), min_size=1, max_size=60), machines=st.integers(1, 20))
def test_list_scheduling_keeps_the_first_bound(lengths: list[float], machines: int) -> None:
    values = np.array(lengths)
    tight = values.sum() / machines + values.max() * (machines - 1) / machines
    assert list_schedule(values, machines) <= tight * (1 + 1e-12) + 1e-9
    assert tight <= rollout_bound(len(lengths), machines, float(values.mean()), float(values.max())) + 1e-9
