"""Figures of how far prox is from behave, against another project's own, and the mask of left sequences."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.trainers.losses.divergence import Divergence, sequence_mask
from headrace.trainers.losses.loss import Streams

DATA: dict[str, Any] = json.loads((Path(__file__).parents[3] / "oracles" / "offpolicy_metrics.json").read_text())
PER_TOKEN = {"kl": "mismatch/kl", "k3_kl": "mismatch_kl", "chi2_token": "mismatch/ratio_squared"}
PER_ROW = (
    "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff",
    "ppl_ratio",
)  # fmt: skip


def tensor(rows: Any) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


def streams_of(inputs: dict[str, Any]) -> Streams:
    given = {name: tensor(inputs[name]) for name in ("new", "prox", "behave", "advantages")}
    return Streams(**given, mask=tensor(inputs["mask"]).bool())


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda c: c["case"])
def test_figures_agree_with_the_oracles(case: dict[str, Any]) -> None:
    """Rows without a trained token count there as rows of perplexity 1 and are left out here."""
    streams = streams_of(DATA["inputs"][case["inputs"]])
    found, wanted = Divergence.of(streams), case["outputs"]["metrics"]
    tokens, rows = float(streams.mask.sum()), float(streams.mask.any(-1).sum())
    empty = streams.mask.shape[0] - rows
    for name, ours in PER_TOKEN.items():
        value = float(found.sums[ours]) / tokens - (name == "chi2_token")
        assert value == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
    for name in PER_ROW:
        theirs = wanted[name] * streams.mask.shape[0] - (empty if name.endswith(("_ppl", "ratio")) else 0)
        theirs += empty if name.endswith("log_ppl") else 0
        assert float(found.rows[f"mismatch/{name}"]) == pytest.approx(theirs, rel=1e-5, abs=1e-5), name
    square = float(found.rows["mismatch/sequence_ratio_squared"]) + empty
    assert square / streams.mask.shape[0] - 1 == pytest.approx(wanted["chi2_seq"], rel=1e-5, abs=1e-6)
    assert float(found.peaks["mismatch/log_ppl_diff_max"]) == pytest.approx(wanted["log_ppl_diff_max"], abs=1e-6)
    assert -float(found.peaks["mismatch/log_ppl_diff_negative_max"]) == pytest.approx(
        wanted["log_ppl_diff_min"], abs=1e-6
    )


def test_impossible_tokens_give_finite_figures() -> None:
    given = streams_of(DATA["inputs"]["base"])
    for field in ("prox", "behave"):
        far = getattr(given, field).clone()
        far[0, 1] = -torch.inf
        parts = {name: getattr(given, name) for name in ("new", "prox", "behave", "advantages", "mask")}
        found = Divergence.of(Streams(**{**parts, field: far}))
        assert all(torch.isfinite(x).all() for x in (*found.sums.values(), *found.rows.values(), *found.peaks.values()))


def test_only_bad_samples_that_were_left_are_masked() -> None:
    away = torch.tensor([[-0.4, -0.2], [-0.4, -0.2], [0.3, 0.1], [-0.4, 0.0]])
    advantages = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]])
    mask = torch.tensor([[True, True], [True, True], [True, True], [False, True]])
    assert sequence_mask(away, advantages, mask, 1e-4).tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]
    assert sequence_mask(away, advantages, mask, 0.5).all()
