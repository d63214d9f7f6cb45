"""Approximations of prox against another project's own, and their ends."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from headrace.trainers.losses.prox import ProxMethod, approximate_prox

DATA: dict[str, Any] = json.loads((Path(__file__).parents[3] / "oracles" / "prox_logp_approx.json").read_text())
(CASE,) = DATA["cases"]
BEHAVE, NEW = (torch.tensor(DATA["inputs"]["base"][name], dtype=torch.float64) for name in ("behave", "new"))
VERSIONS = torch.tensor(DATA["inputs"]["base"]["versions"])
NOW, PROX = CASE["hyper"]["current_version"], CASE["hyper"]["proximal_version"]


@pytest.mark.parametrize(
    ("method", "theirs"), [("loglinear", "loglinear"), ("linear", "linear"), ("behave", "rollout")]
)
def test_approximations_agree_with_the_oracle(method: str, theirs: str) -> None:
    mask = torch.ones_like(VERSIONS, dtype=torch.bool)
    found = approximate_prox(cast(ProxMethod, method), BEHAVE, NEW, VERSIONS, mask, prox=PROX, now=NOW)
    wanted = torch.tensor(CASE["outputs"][theirs], dtype=torch.float64)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_fresh_tokens_keep_what_they_were_sampled_with_and_masked_ones_are_zero() -> None:
    mask = VERSIONS >= 0
    far = torch.where(mask, BEHAVE, -torch.inf)
    for method in ("loglinear", "linear", "behave"):
        found = approximate_prox(method, far, NEW.clone().requires_grad_(), VERSIONS, mask, prox=PROX, now=NOW)  # type: ignore[arg-type]
        assert not found.requires_grad and torch.isfinite(found).all() and not found[~mask].any()
        assert torch.allclose(found[VERSIONS == NOW], BEHAVE[VERSIONS == NOW])
