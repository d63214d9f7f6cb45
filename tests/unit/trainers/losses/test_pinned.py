"""Values of the base case to be read by eye (spec of the losses, part C), and what a loss tells about itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.connectors.plugins import load
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.losses.aggregation import Denominators, Mode, aggregate
from headrace.trainers.losses.loss import Loss, Streams, configured

BASE = json.loads((Path(__file__).parents[3] / "oracles" / "ppo_clip.json").read_text())["inputs"]["base"]
OFF = {"action": "off"}
SUM: Mode = "seq-mean-token-sum-norm"
NO_DUAL = {"dual_clip": 0.0}
PROX = {"anchor": "prox", "correction": OFF}


def make(name: str, **options: Any) -> Loss:
    loss: Loss = configured(load("headrace.losses", name), options, "trainer.loss_options")
    return loss


def base_streams(**over: torch.Tensor) -> Streams:
    given = {k: torch.tensor(BASE[k], dtype=torch.float64) for k in ("new", "prox", "behave", "advantages", "ref")}
    return Streams(**{**given, **over}, mask=torch.tensor(BASE["mask"]).bool(), rewards=torch.tensor(BASE["scores"]))


@pytest.mark.parametrize(
    ("name", "options", "mode", "value"),
    [
        ("ppo", {"correction": OFF}, "token-mean", -0.23284951331),
        ("ppo", {"correction": OFF}, "seq-mean-token-mean", -0.24562636502),
        ("ppo", {"correction": OFF}, SUM, -1.08663106211),
        ("ppo", {"correction": OFF, "clip_high": 0.28, "dual_clip": 10.0}, "token-mean", -0.24427808474),
        ("decoupled_ppo", {**NO_DUAL, "behave": {"action": "mask", "upper": 5.0}}, "token-mean", -0.28482632401),
        ("decoupled_ppo", {**NO_DUAL, "behave": {"action": "mask", "upper": 1.2}}, "token-mean", -0.13397920720),
        ("decoupled_ppo", {**NO_DUAL, "behave": {"action": "clamp", "upper": 1.2}}, "token-mean", -0.26297107989),
        ("decoupled_ppo", {"behave": {"level": "sequence", "product": True}}, "token-mean", -0.52064200916),
        ("dapo", {"correction": OFF}, "token-mean", -0.24427808474),
        ("gspo", {"correction": OFF}, "seq-mean-token-mean", -0.25025166667),
        ("cispo", {**PROX, "clip_low": 0.2, "clip_high": 0.2}, "token-mean", 0.18056189134),
        ("topr", PROX, "token-mean", 0.26275538495),
        ("m2po", {}, "token-mean", -0.26184226769),
        ("m2po", {"variant": "official"}, "token-mean", -0.153296160148),
        ("m2po", {"variant": "areal", "correction": OFF}, "token-mean", -0.174806902692 * 27 / 28),
    ],
)
def test_pinned_values(name: str, options: dict[str, Any], mode: Mode, value: float) -> None:
    streams = base_streams()
    counts = Denominators(
        tokens=int(streams.mask.sum()), sequences=int(streams.mask.any(-1).sum()), constant=streams.mask.shape[1]
    )
    loss = aggregate(make(name, **options)(streams).loss, streams.mask, mode, counts)
    assert float(loss) == pytest.approx(value, rel=1e-9)


def test_the_pinned_clip_range_of_m2po() -> None:
    sums = make("m2po")(base_streams()).sums
    tokens = float(base_streams().mask.sum())
    assert float(sums["m2po/clip_low"]) / tokens == pytest.approx(0.393469340287)
    assert float(sums["m2po/clip_high"]) / tokens == pytest.approx(0.6487212707)


@pytest.mark.parametrize("upper", [1.0, 2.0])
def test_truncation_on_what_sampled_is_the_clip_without_a_lower_side(upper: float) -> None:
    """Loss, gradient and share of truncated tokens: ROLL Flash's TIS is CISPO with bounds 0 and C."""

    def found(loss: Loss) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        new = torch.tensor(BASE["new"], dtype=torch.float64).requires_grad_()
        terms = loss(base_streams(new=new))
        terms.loss.sum().backward()
        assert new.grad is not None
        return terms.loss, new.grad, terms.sums["clip_fraction"]

    ours = found(make("tis", anchor="behave", correction={"upper": upper}))
    assert all(map(torch.allclose, ours, found(make("cispo", clip_low=1.0, clip_high=upper - 1))))
    assert not torch.allclose(ours[0], found(make("tis", correction={"upper": upper}))[0])
    assert make("tis", anchor="behave").corrects_staleness
    with pytest.raises(ConfigurationError, match="normalize"):
        make("tis", anchor="behave", correction={"normalize": True})


@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo", "grpo", "dapo", "cispo", "topr", "sapo", "m2po"])
def test_on_policy_gradients_are_those_of_the_plain_policy_gradient(name: str) -> None:
    def gradient(loss: str) -> torch.Tensor:
        new = torch.tensor(BASE["new"], dtype=torch.float64).requires_grad_()
        still = new.detach()
        """Of the sum of the loss where prox and behave are new itself."""
        make(loss)(base_streams(new=new, prox=still, behave=still)).loss.sum().backward()
        assert new.grad is not None
        return new.grad

    assert torch.allclose(gradient(name), gradient("reinforce"))


def test_losses_without_a_correction_say_so() -> None:
    assert make("decoupled_ppo").corrects_staleness
    assert not make("decoupled_ppo", behave=OFF).corrects_staleness
    assert not make("ppo", correction=OFF).corrects_staleness
    assert make("ppo", correction=OFF, anchor="behave").corrects_staleness


def test_the_correction_truncates_at_two_by_default() -> None:
    new = torch.zeros(1, 3, dtype=torch.float64)
    behave = torch.tensor([[0.0, -1.0, 5.0]], dtype=torch.float64)
    streams = Streams(
        new=new, prox=new, behave=behave, advantages=torch.ones(1, 3), mask=torch.ones(1, 3, dtype=torch.bool)
    )
    terms = make("decoupled_ppo")(streams)
    assert terms.loss[0].tolist() == pytest.approx([-1.0, -2.0, -0.006737946999])
    assert float(terms.peaks["correction/weight_max"]) == 2.0


@pytest.mark.parametrize("name", ["grpo", "decoupled_ppo", "m2po", "cispo", "reinforce"])
def test_every_loss_may_have_a_penalty_that_needs_the_reference(name: str) -> None:
    plain, loss = make(name), make(name, kl_weight=0.1, kl="k2")
    assert loss.needs_reference and not plain.needs_reference
    given = base_streams()
    assert given.ref is not None
    added = 0.1 * 0.5 * torch.where(given.mask, given.new - given.ref, 0) ** 2
    assert torch.allclose(loss(given).loss, plain(given).loss + added)
    without = Streams(
        new=given.new, prox=given.prox, behave=given.behave, advantages=given.advantages, mask=given.mask,
        rewards=given.rewards,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="reference"):
        loss(without)


def test_the_unbiased_penalty_has_the_gradient_of_the_divergence() -> None:
    """Of ``r k3`` by the log-prob, where new is prox: k3 plus its slope; of ``k1+`` and ``k3+``: that of k2."""
    given = base_streams()
    assert given.ref is not None

    def slope(kind: str, unbiased: bool = False) -> torch.Tensor:
        new = given.new.clone().requires_grad_()
        same = base_streams(new=new, prox=given.new, behave=given.new, advantages=torch.zeros_like(given.new))
        make("grpo", kl_weight=1.0, kl=kind, kl_unbiased=unbiased)(same).loss.sum().backward()
        assert new.grad is not None
        return new.grad

    away = torch.where(given.mask, given.new - given.ref, 0)
    assert torch.allclose(slope("k3", True), torch.where(given.mask, (-away).exp() - 1 + away, 0) + slope("k3"))
    assert torch.allclose(slope("k1+"), slope("k2")) and torch.allclose(slope("k3+"), slope("k2"))
    assert torch.allclose(slope("k2"), away)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"trainer.loss_options.clip: .*clip_low"):
        make("ppo", clip=0.1)
