"""The critic's loss against another project's own, its clip, and what stands outside the mask."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.trainers.losses.value import value_loss

DATA: dict[str, Any] = json.loads((Path(__file__).parents[3] / "oracles" / "value_loss.json").read_text())


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda c: c["case"])
def test_the_loss_agrees_with_the_oracle(case: dict[str, Any]) -> None:
    given = DATA["inputs"][case["inputs"]]
    new, old, returns = (torch.tensor(given[name], dtype=torch.float64) for name in ("vpreds", "values", "returns"))
    mask = torch.tensor(given["mask"]).bool()
    terms = value_loss(new, old, returns, mask, case["hyper"]["cliprange_value"])
    assert float(terms.loss.sum() / mask.sum()) == pytest.approx(case["outputs"]["loss"], rel=1e-5, abs=1e-6)
    clipped = float(terms.sums["critic/clip_fraction"]) / float(mask.sum())
    assert clipped == pytest.approx(case["outputs"]["clipfrac"], abs=1e-6)


def test_a_value_that_moved_beyond_the_clip_has_no_gradient() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    new = torch.tensor([[0.9, 0.1, 0.6]], requires_grad=True)
    terms = value_loss(new, torch.tensor([[0.2, 0.0, 0.5]]), torch.tensor([[1.0, 1.0, 0.0]]), mask, 0.2)
    terms.loss.sum().backward()
    assert new.grad is not None
    assert new.grad[0].tolist() == pytest.approx([0.0, -0.9, 0.6]), "beyond the clip, inside it, away from the return"
    assert float(terms.sums["critic/clip_fraction"]) == 1.0
    still = new.detach()
    assert float(value_loss(still, still, torch.ones(1, 3), mask, 0.0).loss[0, 1]) == pytest.approx(0.5 * 0.81)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_what_stands_outside_the_mask_is_never_looked_at(value: float) -> None:
    mask = torch.tensor([[True, False]])
    new = torch.tensor([[0.5, value]], requires_grad=True)
    terms = value_loss(new, torch.tensor([[0.5, value]]), torch.tensor([[1.0, value]]), mask, 0.2)
    terms.loss.sum().backward()
    assert new.grad is not None and new.grad.tolist() == [[-0.5, 0.0]]
    assert all(torch.isfinite(x) for x in terms.sums.values())
