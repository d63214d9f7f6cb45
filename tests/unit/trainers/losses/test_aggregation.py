"""Aggregation: oracle values of every mode, and the sum over micro-batches equals the whole."""

import json
from pathlib import Path

import pytest
import torch

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.losses.aggregation import MODES, Denominators, Mode, aggregate, mode_named

CASES = json.loads((Path(__file__).parents[3] / "oracles" / "agg_modes.json").read_text())


def counts_of(mask: torch.Tensor) -> Denominators:
    return Denominators(tokens=int(mask.sum()), sequences=int(mask.any(-1).sum()), constant=mask.shape[1])


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda c: f"{c['case']}-{c['loss_agg_mode']}")
def test_modes_agree_with_the_oracles(case: dict) -> None:
    """Of three projects; one counts all rows, and one leaves the mask out of the numerator of token-mean (29.36)."""
    inputs = CASES["inputs"][case["inputs"]]
    loss = torch.tensor(inputs["loss_mat"], dtype=torch.float64)
    mask = torch.tensor(inputs["mask"]).bool()
    counts, mode = counts_of(mask), case["loss_agg_mode"]
    every = Denominators(tokens=counts.tokens, sequences=len(mask), constant=counts.constant)
    for project, wanted in case["outputs"].items():
        if project == "verl_dp2_global":
            continue
        used = every if project in ("slime_div_by_all_rows", "ROLL_default_args") else counts
        found = float(aggregate(loss, mask, mode, used))
        leaks = mode == "token-mean" and project.startswith("ROLL")
        assert (found == pytest.approx(wanted, rel=1e-5)) == (not leaks), project


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda c: f"{c['case']}-{c['loss_agg_mode']}")
def test_global_counts_agree_with_the_oracles(case: dict) -> None:
    inputs, hyper = CASES["inputs"][case["inputs"]], case["hyper"]["verl_dp2_global"]
    loss = torch.tensor(inputs["loss_mat"], dtype=torch.float64)
    mask = torch.tensor(inputs["mask"]).bool()
    counts = Denominators(
        tokens=hyper["batch_num_tokens"], sequences=hyper["global_batch_size"], constant=hyper["loss_scale_factor"]
    )
    ours = float(aggregate(loss, mask, case["loss_agg_mode"], counts)) * hyper["dp_size"]
    assert ours == pytest.approx(case["outputs"]["verl_dp2_global"], rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_parts_add_up_to_the_whole(mode: Mode) -> None:
    generator = torch.Generator().manual_seed(1)
    loss = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(7, 5, generator=generator) < 0.6
    counts = counts_of(mask)
    whole = aggregate(loss, mask, mode, counts)
    parts = sum(aggregate(loss[rows], mask[rows], mode, counts) for rows in (slice(0, 2), slice(2, 3), slice(3, 7)))
    assert torch.isclose(whole, torch.as_tensor(parts), rtol=1e-12)


def test_what_is_masked_does_not_matter() -> None:
    loss, mask = torch.tensor([[1.0, float("nan")]], requires_grad=True), torch.tensor([[True, False]])
    total = aggregate(loss, mask, "token-mean", counts_of(mask))
    total.backward()
    assert total.item() == 1.0
    assert loss.grad is not None and loss.grad.tolist() == [[1.0, 0.0]]


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ConfigurationError, match="token-mean"):
        mode_named("tokens")
