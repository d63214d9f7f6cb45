"""Thresholds of M2PO against another project's own, and that order and splits do not matter."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainers.losses.loss import Streams
from headrace.trainers.losses.m2po import M2PO, M2POOptions
from headrace.trainers.losses.second_moment import clip_range, largest_kept

CASES = json.loads((Path(__file__).parents[3] / "oracles" / "astraflow_m2po.json").read_text())["cases"]
SQUARES = st.lists(st.floats(0, 4, width=32), max_size=40)


@pytest.mark.parametrize("at", range(len(CASES)))
def test_ranges_losses_and_gradients_agree_with_the_oracles(at: int) -> None:
    case: dict[str, Any] = CASES[at]
    row = {name: torch.tensor([case[name]], dtype=torch.float64) for name in ("old", "new", "adv")}
    mask, new = torch.tensor([case["mask"]]), row["new"].requires_grad_()
    loss = M2PO(M2POOptions(budget=case["thr"], log_ratio_limit=80.0))
    streams = Streams(new=new, prox=row["new"].detach(), behave=row["old"], advantages=row["adv"], mask=mask)
    found = loss.range_of(loss.survey(streams)["squares"])
    assert (found.low, found.high) == pytest.approx((case["eps_low"], case["eps_high"]), rel=1e-5, abs=1e-6)
    total = loss(streams).loss.sum() / mask.sum()
    total.backward()
    assert new.grad is not None
    assert float(total.detach()) == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
    wanted = torch.tensor([case["grad"]], dtype=torch.float64)
    differs = ~torch.isclose(new.grad, wanted, rtol=1e-5, atol=1e-6)
    ratio = (row["new"].detach() - row["old"]).exp()
    at_the_edge = torch.isclose(ratio, torch.tensor(1 + found.high).double()) | torch.isclose(
        ratio, torch.tensor(1 - found.low).double()
    )
    assert not (differs & ~at_the_edge).any(), "only the token that sets the threshold may flip by a rounding"


def test_all_cases_are_run() -> None:
    print(f"\n{len(CASES)} cases of astraflow_m2po")
    assert len(CASES) == 25


@settings(max_examples=100, deadline=None)
@given(squares=SQUARES, budget=st.floats(1e-3, 2), seed=st.integers(0, 9))
def test_what_is_kept_meets_the_budget_and_one_more_would_not(squares: list[float], budget: float, seed: int) -> None:
    x = torch.tensor(squares, dtype=torch.float64)
    limit = largest_kept(x, budget)
    kept, rest = x[x <= limit], x[x > limit].sort().values
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))]
    assert largest_kept(shuffled, budget) == limit
    if not kept.numel():
        assert not squares or float(x.min()) >= budget
        return
    if rest.numel():
        assert float(torch.cat([kept, rest[:1]]).mean()) >= budget - 1e-12
    distinct = len(set(squares)) == len(squares)
    if distinct:
        assert float(kept.mean()) < budget


@settings(max_examples=100, deadline=None)
@given(squares=SQUARES, budget=st.floats(1e-3, 2))
def test_ranges_are_bounded_and_grow_with_the_budget(squares: list[float], budget: float) -> None:
    x = torch.tensor(squares, dtype=torch.float64)
    for capped in (False, True):
        small, large = clip_range(x, budget, capped=capped), clip_range(x, 2 * budget, capped=capped)
        assert 0 <= small.low <= large.low <= 0.95 and 0 <= small.high <= large.high <= 20.0


def test_nothing_to_drop_leaves_the_widest_range_and_one_ratio_always_stays() -> None:
    x = torch.tensor([0.01, 0.02])
    assert (clip_range(x, 1.0, capped=False).low, clip_range(x, 1.0, capped=False).high) == (0.95, 20.0)
    assert clip_range(x, 1e-9, capped=False).high == pytest.approx(math.exp(0.1) - 1)
    assert clip_range(x, 1e-9, capped=True).high == 0.0
    assert clip_range(torch.empty(0), 0.1, capped=True).low == 0.95


def test_equal_squares_are_kept_together() -> None:
    x = torch.tensor([0.0, 0.04, 0.04, 0.04, 1.0])
    assert largest_kept(x, 0.03) == pytest.approx(0.04)
    assert largest_kept(torch.tensor([0.5, 0.5]), 0.1) == -1.0
    assert largest_kept(torch.empty(0), 0.1) == -1.0
