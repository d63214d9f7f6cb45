"""Advantages against values that other projects' own functions gave: to 1e-5, and finite where theirs are not.

Each test takes one or more oracle files whole; what we do not reproduce stands in ``LEFT_OUT`` with its reason.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.trainers.advantages.advantage import AdvantageOptions, BatchAdvantage, GroupRewards, Scored
from headrace.trainers.advantages.dr import GroupCentered
from headrace.trainers.advantages.gae import GAE, GAEOptions
from headrace.trainers.advantages.gpg import GPG, GPGOptions
from headrace.trainers.advantages.group import GroupNormalized, GroupNormalizedOptions
from headrace.trainers.advantages.normalized import BatchNormalized, NormalizedOptions
from headrace.trainers.advantages.opo import OPO
from headrace.trainers.advantages.pass_at_k import PassAtK, PassAtKOptions
from headrace.trainers.advantages.reinforce_pp import ReinforcePP
from headrace.trainers.advantages.reinforce_pp_baseline import ReinforcePPBaseline, ReinforcePPBaselineOptions
from headrace.trainers.advantages.remax import ReMax, ReMaxOptions
from headrace.trainers.advantages.returns import ReturnsOptions
from headrace.trainers.advantages.rloo import LeaveOneOut
from headrace.trainers.advantages.tokens import discounted, generalized, whitened
from headrace.trainers.losses.kl import kl_per_token

FOLDER = Path(__file__).parents[3] / "oracles"
COUNTS: Counter[str] = Counter()
LEFT_OUT = {
    (
        "adv_norm_modes",
        "ROLL",
        "group without mean",
    ): "3 x 12 values from 12 rewards, and 1e6 for a group without spread",
    ("adv_gae", "ROLL", "gap"): "it knows no mask, so observation tokens take part",
    ("adv_reinforce_pp", "verl", "equal"): "2.6e-6 from a rounding divided by its own square; we give 0",
}


@cache
def oracle(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return data


def cases(name: str) -> list[Any]:
    data = oracle(name)
    return [
        pytest.param(case, data["inputs"][case["inputs"]], id=f"{name}-{at}-{case['repo']}-{case['case']}")
        for at, case in enumerate(data["cases"])
    ]


def close(found: Any, wanted: Any) -> None:
    """Equal to 1e-5; counts the case."""
    a, b = np.asarray(found, float), np.asarray(wanted, float)
    assert np.isfinite(a).all()
    assert np.allclose(a, b, rtol=1e-5, atol=1e-6), f"{a}\n{b}"
    COUNTS["equal"] += 1


def left_out(key: tuple[str, str, str]) -> None:
    assert LEFT_OUT[key]
    COUNTS[f"left out: {': '.join(key)}"] += 1


def alone(values: Mapping[str, float]) -> dict[str, float]:
    """The sums of one rank."""
    return dict(values)


def group_of(rewards: list[float], **more: Any) -> GroupRewards:
    std = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
    return GroupRewards(rewards=rewards, mean=float(np.mean(rewards)), std=std, count=len(rewards), **more)


def grouped(inputs: dict[str, Any]) -> list[list[int]]:
    """Indices of the members of each group."""
    groups: dict[int, list[int]] = defaultdict(list)
    size = inputs.get("group_size")
    keys = inputs["group_ids"] if size is None else [at // size for at in range(len(inputs["rewards"]))]
    for at, group in enumerate(keys):
        groups[group].append(at)
    return list(groups.values())


def scored(inputs: dict[str, Any], masks: Any = None) -> list[Scored]:
    """All trajectories of a case, in order; without masks each has one trained token."""
    out: dict[int, Scored] = {}
    for number, members in enumerate(grouped(inputs)):
        group = group_of([inputs["rewards"][at] for at in members])
        for at in members:
            mask = np.array(masks[at], bool) if masks is not None else np.ones(1, bool)
            out[at] = Scored(
                group=(number, 0), reward=inputs["rewards"][at], mean=group.mean, std=group.std, count=group.count,
                masks=[mask], roles=["policy"],
            )  # fmt: skip
    return [out[at] for at in range(len(out))]


def of_batch(advantage: BatchAdvantage, members: list[Scored]) -> list[Any]:
    return [part.advantages[0] for part in advantage.of_batch(members, alone)]


def of_groups(advantage: Any, inputs: dict[str, Any], **more: Any) -> list[Any]:
    """Values of an advantage of groups on the tokens of each member."""
    out: dict[int, Any] = {}
    for members in grouped(inputs):
        extra = {name: [column[at] for at in members] for name, column in more.items()}
        values = advantage(group_of([inputs["rewards"][at] for at in members], **extra))
        for at, value in zip(members, values, strict=True):
            out[at] = value * np.array(inputs["mask"][at])
    return [out[at] for at in range(len(out))]


@pytest.mark.parametrize(("case", "inputs"), cases("adv_grpo") + cases("adv_dr_grpo") + cases("adv_rloo"))
def test_group_advantages(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Two functions of one project disagree on a group of one; our option gives either."""
    name, singleton = case["function"], "zero" if "vectorized" in case["function"] else "raw"
    if "rloo" in name:
        advantage: Any = LeaveOneOut(AdvantageOptions(singleton=singleton))  # type: ignore[arg-type]
    elif case in oracle("adv_dr_grpo")["cases"]:
        advantage = GroupCentered(AdvantageOptions(singleton=singleton))  # type: ignore[arg-type]
    else:
        advantage = GroupNormalized(GroupNormalizedOptions(singleton=singleton))  # type: ignore[arg-type]
    close(of_groups(advantage, inputs), case["outputs"]["advantages"])


@pytest.mark.parametrize(("case", "inputs"), cases("adv_opo_gpg_remax_passk"))
def test_opo_gpg_remax_and_pass_at_k(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    name, wanted = case["function"], case["outputs"]["advantages"]
    if "opo" in name:
        found = of_groups(OPO(AdvantageOptions(singleton="raw")), inputs, lengths=inputs["response_lengths"])
    elif "gpg" in name:
        found = of_batch(GPG(GPGOptions(singleton="raw", **case["hyper"])), scored(inputs, inputs["mask"]))
    elif "remax" in name:
        parts = [{"greedy": baseline} for baseline in case["hyper"]["reward_baselines"]]
        found = of_groups(ReMax(ReMaxOptions()), inputs, parts=parts)
    else:
        found = of_groups(PassAtK(PassAtKOptions()), inputs)
    close(found, wanted)


@pytest.mark.parametrize(("case", "inputs"), cases("adv_norm_modes"))
def test_means_and_deviations_of_batch_and_group(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    given, areal = case["hyper"], case["repo"] == "AReaL"
    names = ("mean_level", "std_level") if areal else ("norm_mean_type", "norm_std_type")
    mean, std = (given[name] or "none" for name in names)
    options = NormalizedOptions(
        mean=mean, std=std, epsilon=1e-5 if areal else 1e-6, spread="residuals" if areal else "rewards",
        leave_one_out=given.get("mean_leave1out", False), unbiased=given.get("std_unbiased", True),
        singleton="raw" if given.get("mean_leave1out") else "zero",
    )  # fmt: skip
    found = [float(values[0]) for values in of_batch(BatchNormalized(options), scored(inputs))]
    if not areal and std == "group" and mean != "group":
        assert np.isfinite(found).all() and max(map(abs, found)) < 10
        left_out(("adv_norm_modes", "ROLL", "group without mean"))
        return
    if any(isinstance(x, str) for x in case["outputs"]["normalized"]):
        assert np.isfinite(found).all()
        COUNTS["finite where the reference is not"] += 1
        return
    close(found, case["outputs"]["normalized"])


@pytest.mark.parametrize(("case", "inputs"), cases("adv_batch_norm_tokens"))
def test_whitening(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    mask = np.array(inputs["mask"], bool)
    rows = [np.array(row, float)[m] for row, m in zip(inputs["advantages"], mask, strict=True)]
    found = whitened(rows, alone, case["hyper"].get("eps", 1e-8))
    if case["case"] != "masked":  # one valid token or none: errors and untouched rows there, zeros and nothing here
        assert not np.concatenate(found).any()
        COUNTS["finite where the reference fails"] += 1
        return
    close(np.concatenate(found), np.array(case["outputs"]["normalized"])[mask])


@pytest.mark.parametrize(("case", "inputs"), cases("adv_reinforce_pp"))
def test_reinforce_pp(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    options = ReturnsOptions(gamma=case["hyper"]["gamma"], whiten=case["repo"] == "verl")
    if case["repo"] == "ROLL":  # no mask and no reward of a trajectory: rewards on tokens
        rows = np.array(inputs["token_level_rewards"])
        close([discounted(row, options.gamma) for row in rows], case["outputs"]["returns"])
        return
    found = of_batch(ReinforcePP(options), scored(inputs, inputs["mask"]))
    if case["case"] == "all_rewards_equal_batch":
        assert not np.concatenate(found).any()
        left_out(("adv_reinforce_pp", "verl", "equal"))
        return
    close(found, case["outputs"]["advantages"])


@pytest.mark.parametrize(("case", "inputs"), cases("adv_reinforce_pp_baseline"))
def test_reinforce_pp_with_a_baseline(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    options = ReinforcePPBaselineOptions(singleton="raw")
    close(of_batch(ReinforcePPBaseline(options), scored(inputs, inputs["mask"])), case["outputs"]["advantages"])
    if case["case"] == "all_rewards_equal_batch":
        quiet = of_batch(ReinforcePPBaseline(ReinforcePPBaselineOptions()), scored(inputs, inputs["mask"]))
        assert not np.concatenate(quiet).any(), "by default nothing is learnt from a group of one"


@pytest.mark.parametrize(("case", "inputs"), cases("adv_gae"))
def test_gae_with_observations_between_turns(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Rewards on tokens there; the parts of turns and the rest here, which is the same."""
    hyper, out = case["hyper"], case["outputs"]
    shape = np.array(inputs["values"]).shape
    mask = np.array(inputs.get("mask", np.ones(shape)), bool)
    if case["repo"] == "ROLL" and not mask.all():
        left_out(("adv_gae", "ROLL", "gap"))
        return
    lam = hyper.get("lam", hyper.get("lambd"))
    raw, members = [], []
    for row, reward, values in zip(mask, inputs["token_level_rewards"], inputs["values"], strict=True):
        rewards = np.array(reward)
        raw.append(generalized(rewards[row], np.array(values)[row], hyper["gamma"], lam))
        members.append(
            Scored(
                group=(len(members), 0), reward=float(rewards[row].sum()), mean=0.0, std=0.0, count=1, masks=[row],
                roles=["policy"], values=[np.array(values)],
            )
        )  # fmt: skip
    names = ("advantages",) if "advantages" in out else ("advantages_raw",)
    for wanted, row, found in zip(out[names[0]], mask, raw, strict=True):
        assert np.allclose(found, np.array(wanted)[row], rtol=1e-5, atol=1e-6)
    close(np.concatenate(raw), np.array(out[names[0]])[mask])
    if "advantages_whitened" not in out:
        return
    white = np.concatenate(whitened(raw, alone, 1e-8))
    assert np.allclose(white, np.array(out["advantages_whitened"])[mask], rtol=1e-5, atol=1e-6)
    ours = GAE(GAEOptions(gamma=hyper["gamma"], lam=lam, whiten=False)).of_batch(members, alone)
    rewards = [np.array(r)[m] for r, m in zip(inputs["token_level_rewards"], mask, strict=True)]
    ends = [bool(r[-1] == r.sum()) for r in rewards]
    assert any(ends)
    for at in np.flatnonzero(ends):
        assert np.allclose(ours[at].advantages[0][mask[at]], raw[at])
        assert np.allclose(ours[at].returns[0][mask[at]], np.array(out["returns"])[at][mask[at]], rtol=1e-5)


@pytest.mark.parametrize(("case", "inputs"), cases("areal_advantage_pipeline"))
def test_a_pipeline_of_group_norm_penalty_returns_and_batch_norm(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Their arrays are rolled by one: the advantage of a token stands where it is predicted."""
    hyper, normed = case["hyper"], case["hyper"]["reward_norm"] is not None
    options = ReinforcePPBaselineOptions(
        reward="normalized" if normed else "shaped", reward_epsilon=1e-5, gamma=hyper["discount"],
        kl_weight=hyper["kl_ctl"], kl=hyper["kl_estimator"], whiten=hyper["adv_norm"] is not None, epsilon=1e-5,
    )  # fmt: skip
    mask = np.array(inputs["loss_mask"], bool)
    behave, ref = (torch.tensor(inputs[k], dtype=torch.float64) for k in ("logprobs", "ref_logp_before_roll"))
    kl = kl_per_token(behave, ref, torch.from_numpy(mask), hyper["kl_estimator"]).numpy()
    members = []
    for at, reward in enumerate(inputs["rewards"]):
        pair = group_of(inputs["rewards"][at // 2 * 2 : at // 2 * 2 + 2])
        members.append(
            Scored(
                group=(at // 2, 0), reward=reward, mean=pair.mean, std=pair.std, count=2, masks=[mask[at]],
                roles=["policy"], kl=[kl[at]],
            )
        )  # fmt: skip
    found = np.stack(of_batch(ReinforcePPBaseline(options), members))
    wanted = np.roll(np.array(case["outputs"]["advantages"]), 1, axis=1)
    close(found[mask], wanted[mask])


def test_every_case_was_run() -> None:
    """Last in this file: prints how many cases of the oracle files were compared."""
    names = (
        "adv_grpo", "adv_dr_grpo", "adv_rloo", "adv_opo_gpg_remax_passk", "adv_norm_modes", "adv_batch_norm_tokens",
        "adv_reinforce_pp", "adv_reinforce_pp_baseline", "adv_gae", "areal_advantage_pipeline",
    )  # fmt: skip
    total = sum(len(oracle(name)["cases"]) for name in names)
    print(f"\n{total} cases of advantages in {len(names)} files: {dict(COUNTS)}")
    assert total == 64
    if COUNTS.total() > 1:  # not when this test is run alone
        assert COUNTS.total() == total and math.isclose(COUNTS["equal"], total, abs_tol=10)
