"""Losses against values that other projects' own functions gave: loss and gradient to 1e-5, finite where they are not.

Each oracle file holds inputs and cases; ``ours`` says which loss of ours a case is, or why it has none.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.trainers.losses.aggregation import Denominators, Mode, aggregate
from headrace.trainers.losses.anchored import AnchoredOptions
from headrace.trainers.losses.cispo import CISPO, CISPOOptions
from headrace.trainers.losses.correction import Correction
from headrace.trainers.losses.decoupled_ppo import DecoupledPPO, DecoupledPPOOptions
from headrace.trainers.losses.dppo import DPPO, DPPOOptions
from headrace.trainers.losses.gmpo import GMPO, GMPOOptions
from headrace.trainers.losses.gspo import GSPO, GSPOOptions
from headrace.trainers.losses.ipo import IPO, IPOOptions
from headrace.trainers.losses.kl import kl_per_token
from headrace.trainers.losses.loss import Loss, Streams, log_ratio
from headrace.trainers.losses.m2po import M2PO, M2POOptions
from headrace.trainers.losses.ppo import PPO, PPOOptions
from headrace.trainers.losses.reinforce import Reinforce
from headrace.trainers.losses.sapo import SAPO, SAPOOptions
from headrace.trainers.losses.topr import TOPR, TOPROptions

FOLDER = Path(__file__).parents[3] / "oracles"
FILES = (
    "ppo_clip", "decoupled_ppo", "dapo", "dr_grpo", "tis_token", "tis_sequence", "kl_estimators", "gspo", "cispo",
    "topr", "m2po", "reinforce", "extra_sapo_gmpo_kimi", "prime_dppo_ipo",
)  # fmt: skip
OFF = Correction(action="off")
WIDE = 80.0
"""A clamp of log ratios that no finite exponential reaches: where the reference has none."""
FARTHER = 2000.0
"""A clamp that no case reaches, for losses that average log ratios before the exponential."""


class Skip(Exception):
    """A case that we do not reproduce, with the reason."""


@cache
def oracle(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def number(x: Any) -> float:
    return float(x) if isinstance(x, str) else x


def tensor(rows: Any) -> Tensor:
    return torch.tensor([[number(x) for x in row] for row in rows], dtype=torch.float64)


def streams_of(inputs: dict[str, Any], new: Tensor) -> Streams:
    return Streams(
        new=new,
        prox=tensor(inputs["prox"]),
        behave=tensor(inputs["behave"]),
        advantages=tensor(inputs["advantages"]),
        mask=tensor(inputs["mask"]).bool(),
        ref=tensor(inputs["ref"]),
        rewards=torch.tensor(inputs["scores"], dtype=torch.float64),
    )


def clip_of(hyper: dict[str, Any]) -> dict[str, float]:
    """Clip range and dual clip under the names that the projects give them."""
    low = next((hyper[k] for k in ("clip_low", "pg_clip_low", "eps_clip", "pg_clip", "clip") if k in hyper), 0.2)
    high = next(
        (hyper[k] for k in ("clip_high", "pg_clip_high", "eps_clip_higher", "eps_clip_high") if k in hyper), low
    )
    dual = next((hyper[k] for k in ("dual_clip_c", "c_clip", "eps_clip_c", "effective_c") if hyper.get(k)), 0.0)
    return {"clip_low": low, "clip_high": high, "dual_clip": dual}


def ours(case: dict[str, Any]) -> Callable[[Streams], Tensor]:
    """The loss per token that a case is about. Raises Skip."""
    name, repo, hyper = case["algorithm"], case["repo"], case["hyper"]
    limit = 20.0 if repo == "verl" else WIDE
    clip: dict[str, Any] = {**clip_of(hyper), "log_ratio_limit": limit}
    if name.startswith("kl "):
        return kl_of(case)
    if name.startswith("reinforce + "):
        product = hyper["rollout_is"] == "sequence"
        how = Correction(
            level=hyper["rollout_is"], upper=hyper["threshold"], product=product, normalize=hyper["batch_normalize"]
        )
        return lambda s: Reinforce(AnchoredOptions(correction=how))(s).loss
    other = others(name, hyper, clip)
    if other is not None:
        return lambda s: other(s).loss
    if name.startswith("decoupled_ppo/"):
        return lambda s: DecoupledPPO(DecoupledPPOOptions(**clip, behave=behave_of(hyper)))(s).loss
    how = OFF
    if name.startswith("ppo_clip x train_infer_correction"):
        kind = hyper["weight_type"]
        level = "sequence" if kind == "geometric" else kind
        how = Correction(level=level, upper=hyper["upper_bound"], product=kind in ("sequence", "segment"))
    elif name == "slime vanilla TIS on ppo":
        how = Correction(upper=hyper["tis_clip"])
    elif name == "slime IcePop on ppo":
        how = Correction(action="mask", upper=hyper["tis_clip"], lower=hyper["tis_clip_low"])
    elif not name.startswith(("ppo_clip", "dapo", "dr_grpo")):
        raise Skip(f"no loss {name}")
    return lambda s: PPO(PPOOptions(**clip, correction=how))(s).loss


def others(name: str, hyper: dict[str, Any], clip: dict[str, Any]) -> Loss | None:
    """Our loss for the cases of the smaller oracle files. Raises Skip."""
    wide: dict[str, Any] = {"anchor": "prox", "correction": OFF, "log_ratio_limit": clip["log_ratio_limit"]}
    if name == "gspo":
        return GSPO(GSPOOptions(**{**wide, **clip}))
    if name.startswith("cispo"):
        low = hyper.get("cispo_epsilon_low", clip["clip_low"])
        high = hyper.get("cispo_epsilon_high", clip["clip_high"])
        unified = hyper.get("cispo_use_unified_mask", False)
        return CISPO(CISPOOptions(**wide, clip_low=low, clip_high=high, unified_mask=unified))
    if name.startswith("roll pg_variant"):  # clip(r, 0, C): CISPO without a lower bound
        return CISPO(CISPOOptions(**wide, clip_low=1.0, clip_high=hyper["tis_upper_bound"] - 1))
    if name == "topr":
        positive, negative = hyper["topr_positive_weight"], hyper["topr_negative_weight"]
        return TOPR(TOPROptions(**wide, positive_weight=positive, negative_weight=negative))
    if name in ("reinforce", "vanilla pg"):
        return Reinforce(AnchoredOptions(**wide))
    if name == "sapo":
        return SAPO(SAPOOptions(**wide, tau_positive=hyper["tau_pos"], tau_negative=hyper["tau_neg"]))
    if name.startswith("dppo"):
        return DPPO(DPPOOptions(log_ratio_limit=WIDE))
    if name.startswith("m2po official"):
        least = {"least_low": hyper["miniclip_low"] or 0.0, "least_high": hyper["miniclip_high"] or 0.0}
        return M2PO(M2POOptions(variant="official", budget=hyper["M2_budget"], log_ratio_limit=WIDE, **least))
    if name.startswith("m2po AstraFlow"):
        return M2PO(M2POOptions(budget=hyper["m2_threshold"], log_ratio_limit=WIDE))
    if name.startswith("m2po AReaL"):
        plain: dict[str, Any] = {"correction": OFF, "log_ratio_limit": WIDE, "clip_low": clip["clip_low"]}
        return M2PO(M2POOptions(variant="areal", budget=hyper["m2_threshold"], clip_high=clip["clip_high"], **plain))
    if name == "gmpo":
        bounds = {"clip_low": hyper["clip_low"], "clip_high": hyper["clip_high"]}
        narrow = GMPOOptions(anchor="prox", correction=OFF, **bounds)
        return GMPO(narrow.model_copy(update={"log_ratio_limit": FARTHER}))
    if name == "ipo":
        return IPO(IPOOptions(log_ratio_limit=WIDE, square_weight=hyper["kl_tau"]))
    if name.startswith("kimi15"):
        raise Skip("kimi15's loss has no published formula, and its mask leaks")
    return None


def behave_of(hyper: dict[str, Any]) -> Correction:
    if "rollout_is" in hyper:
        kind = hyper["rollout_is"]
        return Correction(level=kind, upper=hyper["rollout_is_threshold"], product=kind == "sequence")
    rule = hyper["rejection_sampling"]
    if rule is None:
        return OFF
    metric = rule["metric"].removeprefix("kl_")
    return Correction(
        level=rule["level"],
        action=rule["action"],
        metric=metric,
        reduce=rule["agg"],
        upper=rule["upper"],
        lower=rule["lower"] or 0.0,
    )


def kl_of(case: dict[str, Any]) -> Callable[[Streams], Tensor]:
    kind = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(case["hyper"]["kl"], case["hyper"]["kl"])
    weighted = case["hyper"].get("importance_ratio") is not None
    bound = 10.0 if case["hyper"].get("apply_clamp") else 0.0

    def loss(s: Streams) -> Tensor:
        assert s.ref is not None
        limit = 20.0 if case["repo"] == "verl" else WIDE
        kl = kl_per_token(s.new, s.ref, s.mask, kind, limit, bound)  # type: ignore[arg-type]
        return kl * log_ratio(s.new, s.prox, s.mask, WIDE).exp() if weighted else kl

    return loss


def value_and_gradient(case: dict[str, Any], inputs: dict[str, Any]) -> tuple[float, Tensor]:
    new = tensor(inputs["new"]).requires_grad_()
    streams = streams_of(inputs, new)
    loss = ours(case)(streams)
    mask = streams.mask
    given = case["loss_agg_mode"]
    counts = Denominators(
        tokens=int(mask.sum()),
        sequences=mask.shape[0] if given.endswith("ALL rows") else int(mask.any(-1).sum()),
        constant=case["hyper"].get("loss_scale_factor") or mask.shape[1],
    )
    mode: Mode = next((m for m in MODES if given.split(" ")[0] == m), "token-mean")
    if given.startswith("none"):
        counts = Denominators(tokens=1, sequences=1, constant=1)
    if given.endswith("KEPT tokens"):
        counts = Denominators(tokens=case["outputs"]["metrics"]["kept"], sequences=1, constant=1)
    if given == "seq-mean":
        mode, counts = "seq-mean-token-mean", Denominators(tokens=1, sequences=mask.shape[0], constant=1)
    total = aggregate(loss, mask, mode, counts)
    total.backward()
    assert new.grad is not None
    return total.item(), new.grad


MODES: tuple[Mode, ...] = ("seq-mean-token-sum-norm", "seq-mean-token-sum", "seq-mean-token-mean", "token-mean")


def finite(x: Any) -> bool:
    if isinstance(x, list):
        return all(finite(y) for y in x)
    return x is None or math.isfinite(number(x))


@cache
def outcome(name: str) -> tuple[Counter[str], list[str]]:
    """How the cases of a file went by kind, and what is wrong."""
    data, tally = oracle(name), Counter[str]()
    wrong = []
    for number_, case in enumerate(data["cases"]):
        where = f"{name}[{number_}] {case['case']} {case['algorithm']} {case['repo']} {case['loss_agg_mode']}"
        kind, fault = outcome_of(case, data["inputs"][case["inputs"]])
        tally[kind] += 1
        if fault:
            wrong.append(f"{where}: {fault}")
    return tally, wrong


def outcome_of(case: dict[str, Any], inputs: dict[str, Any]) -> tuple[str, str]:
    """The kind of a case's result, and what is wrong with it or nothing."""
    try:
        loss, gradient = value_and_gradient(case, inputs)
    except Skip as skip:
        return f"skipped: {skip}", ""
    if not math.isfinite(loss) or not bool(torch.isfinite(gradient).all()):
        return "wrong", f"not finite: {loss}"
    if "error" in case["outputs"]:
        return "finite where the reference fails", ""
    wanted, slope = case["outputs"]["loss"], case["outputs"].get("grad_new_logprobs")
    if not finite(wanted) or not finite(slope):
        return "finite where the reference is not", ""
    if not math.isclose(loss, wanted, rel_tol=1e-5, abs_tol=1e-6):
        return "wrong", f"loss {loss}, wanted {wanted}"
    if slope is not None and not torch.allclose(gradient, tensor(slope), rtol=1e-5, atol=1e-6):
        return "wrong", f"gradient off by {float((gradient - tensor(slope)).abs().max())}"
    return "equal", ""


@pytest.mark.parametrize("name", FILES)
def test_losses_agree_with_the_oracles(name: str) -> None:
    tally, wrong = outcome(name)
    print(f"{name}: {dict(tally)}")
    assert not wrong, "\n".join(wrong[:20]) + f"\n{len(wrong)} of {tally.total()}"


def test_few_cases_are_left_out_and_each_has_a_reason() -> None:
    total = sum((outcome(name)[0] for name in FILES), Counter[str]())
    skipped = {kind: count for kind, count in total.items() if kind.startswith("skipped: ")}
    print(f"\n{total.total()} cases of losses in {len(FILES)} files: {dict(total)}")
    assert total["equal"] >= 555 and sum(skipped.values()) == 5, skipped
    assert total["finite where the reference is not"] >= 100


@pytest.mark.parametrize("name", FILES)
def test_an_infinity_at_a_masked_position_changes_nothing(name: str) -> None:
    """Such a case has the value and gradient of the base case under the same options."""
    data = oracle(name)
    seen = 0
    for case in data["cases"]:
        if case["case"] != "neg_inf_masked_pos" or case["algorithm"].startswith("kimi15"):
            continue
        base, other = (value_and_gradient(case, data["inputs"][key]) for key in ("base", case["inputs"]))
        assert base[0] == other[0] and torch.equal(base[1], other[1]), case["algorithm"]
        seen += 1
    assert seen or name == "dr_grpo"
