"""Laws: how they are written, what they draw, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from headrace.pipeline.simulation.laws import Law


def drawn(text: object, count: int = 40_000) -> np.ndarray:
    return Law.model_validate(text).draw(np.random.default_rng(3), count)


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        (12, 12.0, 0.0),
        ("constant(4)", 4.0, 0.0),
        ("normal(100, 5)", 100.0, 5.0),
        ("lognormal(900, 0.5)", 900.0, 900 * np.sqrt(np.exp(0.25) - 1)),
        ("lognormal(mean=900, sigma=.5)", 900.0, 900 * np.sqrt(np.exp(0.25) - 1)),
        ("exponential(30)", 30.0, 30.0),
        ({"law": "measured", "values": [1.0, 3.0]}, 2.0, 1.0),
    ],
)
def test_a_law_has_the_mean_and_the_spread_that_it_names(text: object, mean: float, deviation: float) -> None:
    values = drawn(text)
    assert values.mean() == pytest.approx(mean, rel=0.02)
    assert values.std() == pytest.approx(deviation, rel=0.03, abs=1e-9)


def test_nothing_is_below_zero_or_above_the_cap() -> None:
    assert drawn("normal(1, 10)").min() == 0.0
    assert drawn("lognormal(900, 1.0, cap=1000)").max() == 1000.0


@pytest.mark.parametrize(
    "law", ["lognormal(10, 1.0)", "normal(10, 3)", "exponential(10)", 10, "lognormal(9, 1, cap=20)"]
)
def test_the_largest_is_hardly_ever_passed(law: object) -> None:
    assert (drawn(law, 100_000) <= Law.model_validate(law).largest()).mean() > 0.9999


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gauss", "is no law"),
        ("gauss(3)", "Input should be"),
        ("normal(3, x)", "could not convert"),
        ("normal(1, 2, 3, 4)", "Extra inputs"),
        ("normal(mu=3)", "Extra inputs"),
        (-1, "greater than or equal"),
        (float("nan"), "finite"),
        ({"law": "measured"}, "needs values"),
        ({"law": "normal", "values": [1.0]}, "belong to law"),
    ],
)
def test_what_is_no_law_is_refused_with_the_reason(text: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Law.model_validate(text)
