"""Which tokens a correction rejects, against masks that another project's own function gave."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.trainers.losses.correction import Correction, correction_weights

DATA: dict[str, Any] = json.loads((Path(__file__).parents[3] / "oracles" / "rejection.json").read_text())


def rule_of(hyper: dict[str, Any]) -> Correction | None:
    """Our correction for a rule such as ``seq_max_k2`` with its threshold; None for several rules at once."""
    words = hyper["rollout_rs"].split("_")
    if "," in hyper["rollout_rs"]:
        return None
    level, metric = ("token" if words[0] == "token" else "sequence"), words[-1]
    bounds = [float(x) for x in str(hyper["rollout_rs_threshold"]).split("_")]
    lower, upper = 0.0, bounds[0]
    if metric == "k1":  # theirs is log(behave / prox), ours log(prox / behave)
        lower, upper = -math.log(bounds[1]), -math.log(bounds[0])
    reduce = words[1] if level == "sequence" else "mean"
    return Correction.model_validate(
        {"level": level, "action": "mask", "metric": metric, "reduce": reduce, "upper": upper, "lower": lower}
    )


CASES = [
    pytest.param(case, rule, id=f"{case['case']} {case['hyper']['rollout_rs']} {case['hyper']['rollout_rs_threshold']}")
    for case in DATA["cases"]
    if case["repo"] == "verl" and "rollout_rs" in case["hyper"] and "metrics" in case["outputs"]
    for rule in [rule_of(case["hyper"])]
    if rule is not None
]


def tensor(rows: Any) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


def test_the_file_has_cases_of_every_level_metric_and_reduction() -> None:
    rules = {(p.values[1].level, p.values[1].metric, p.values[1].reduce) for p in CASES}  # type: ignore[union-attr]
    assert len(rules) >= 7 and len(CASES) >= 30


@pytest.mark.parametrize(("case", "rule"), CASES)
def test_the_same_tokens_are_rejected(case: dict[str, Any], rule: Correction) -> None:
    inputs = DATA["inputs"][case["inputs"]]
    mask = tensor(inputs["mask"]).bool()
    found = correction_weights(tensor(inputs["prox"]), tensor(inputs["behave"]), mask, rule)
    assert torch.isfinite(found.weight).all()
    assert torch.equal(found.kept, tensor(case["outputs"]["metrics"]["kept_mask"]))
    assert float(found.kept.sum()) == case["outputs"]["loss"]
