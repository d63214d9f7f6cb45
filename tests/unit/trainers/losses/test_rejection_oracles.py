"""Which tokens a correction rejects, against masks that another project's own function gave."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.trainers.losses.correction import Correction, correction_weights, rejected
from headrace.trainers.losses.divergence import sequence_mask
from headrace.trainers.losses.loss import log_ratio

DATA: dict[str, Any] = json.loads((Path(__file__).parents[3] / "oracles" / "rejection.json").read_text())


def rule_of(name: str, threshold: str) -> Correction:
    """Our correction for a rule such as ``seq_max_k2`` with its threshold."""
    words = name.split("_")
    level, metric = ("token" if words[0] == "token" else "sequence"), words[-1]
    bounds = [float(x) for x in threshold.split("_")]
    lower, upper = 0.0, bounds[0]
    if metric == "k1":  # theirs is log(behave / prox), ours log(prox / behave)
        lower, upper = -math.log(bounds[1]), -math.log(bounds[0])
    if metric == "k3":
        metric = "k3_behave"
    reduce = words[1] if level == "sequence" else "mean"
    return Correction.model_validate(
        {"level": level, "action": "mask", "metric": metric, "reduce": reduce, "upper": upper, "lower": lower}
    )


def rules_of(hyper: dict[str, Any]) -> list[Correction]:
    """Our corrections for rules of verl, one or several, or for a filter of ROLL."""
    if "agg_type" in hyper:
        kind, product = hyper["agg_type"], hyper["agg_type"] in ("sequence", "segment")
        return [
            Correction(
                level="sequence" if kind == "geometric" else kind, action="mask", product=product,
                reduce="sum" if product else "mean", lower=hyper["ratio_low"], upper=hyper["ratio_high"],
            )
        ]  # fmt: skip
    names, thresholds = hyper["rollout_rs"].split(","), str(hyper["rollout_rs_threshold"]).split(",")
    return [rule_of(name, threshold) for name, threshold in zip(names, thresholds, strict=True)]


CASES = [
    pytest.param(case, rules_of(case["hyper"]), id=f"{number} {case['case']} {case['algorithm']}")
    for number, case in enumerate(DATA["cases"])
    if "opsm_delta" not in case["hyper"]
]
OPSM = [pytest.param(case, id=case["case"]) for case in DATA["cases"] if "opsm_delta" in case["hyper"]]


def tensor(rows: Any) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


def test_the_file_has_cases_of_every_level_metric_and_reduction() -> None:
    rules = {(rule.level, rule.metric, rule.reduce) for p in CASES for rule in p.values[1]}  # type: ignore[union-attr]
    print(f"\n{len(CASES)} cases of rejection, {len(OPSM)} of sequence masks")
    assert len(rules) >= 9 and len(CASES) + len(OPSM) == len(DATA["cases"]) == 86


@pytest.mark.parametrize(("case", "rules"), CASES)
def test_the_same_tokens_are_rejected(case: dict[str, Any], rules: list[Correction]) -> None:
    inputs = DATA["inputs"][case["inputs"]]
    mask, prox, behave = tensor(inputs["mask"]).bool(), tensor(inputs["prox"]), tensor(inputs["behave"])
    kept = rejected(prox, behave, mask, rules)
    for rule in rules:
        assert torch.isfinite(correction_weights(prox, behave, mask, rule).weight).all()
    if "error" in case["outputs"]:
        assert set(kept.unique().tolist()) <= {0.0, 1.0} and not kept[~mask].any()
        return
    assert torch.equal(kept, tensor(case["outputs"]["metrics"]["kept_mask"]))
    assert float(kept.sum()) == case["outputs"]["loss"]


@pytest.mark.parametrize("case", OPSM)
def test_the_same_sequences_are_masked(case: dict[str, Any]) -> None:
    """Inside the loss mask; a masked infinity, which leaks into theirs, leaves the base case as it is."""
    inputs = DATA["inputs"][case["inputs"]]
    mask, advantages = tensor(inputs["mask"]).bool(), tensor(inputs["advantages"])
    away = log_ratio(tensor(inputs["new"]), tensor(inputs["prox"]), mask)
    found = sequence_mask(away, advantages, mask, case["hyper"]["opsm_delta"])
    same = "base" if case["case"] == "neg_inf_masked_pos" else case["case"]
    (wanted,) = (p.values[0]["outputs"]["metrics"]["opsm_mask"] for p in OPSM if p.values[0]["case"] == same)  # type: ignore[index,call-overload]
    assert torch.equal(found[mask], tensor(wanted)[mask])
