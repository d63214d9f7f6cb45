"""What holds for every installed loss, whatever its formula: masks, infinities, gradients, the on-policy point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.connectors.plugins import installed, load
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.losses.correction import Correction, correction_weights
from headrace.trainers.losses.kl import kl_per_token
from headrace.trainers.losses.loss import Loss, Streams, configured, finite_logprobs, log_ratio, select, token_sums

NAMES = sorted(installed("headrace.losses"))
BY_ROW = [name for name in NAMES if name != "m2po"]
"""Losses whose clip range does not follow from all tokens of a micro-batch."""
SMOOTH = [name for name in NAMES if name not in ("cispo", "gspo", "topr", "dppo", "ipo")]
"""Losses that are an antiderivative of their gradient; the others stop the gradient of a weight on purpose."""
ROWS, TOKENS = 5, 7


def made(name: str, **options: Any) -> Loss:
    loss: Loss = configured(load("headrace.losses", name), options, "trainer.loss_options")
    return loss


def streams(seed: int = 0, spread: float = 0.15, **over: Tensor) -> Streams:
    """Rows of 7 tokens, the first never trained, one row without any; ratios near 1."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return spread * torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)

    behave = -1 - torch.rand(ROWS, TOKENS, generator=generator, dtype=torch.float64)
    mask = torch.rand(ROWS, TOKENS, generator=generator) < 0.7
    mask[:, 0] = False
    mask[2] = False
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    fields = {
        "new": behave + noise(), "prox": behave + noise(), "behave": behave, "ref": behave + noise(), "mask": mask,
        "advantages": (2 * rewards - 1)[:, None].expand(ROWS, TOKENS).clone(), "rewards": rewards,
    }  # fmt: skip
    return Streams(**{**fields, **over})


def slope(loss: Loss, given: Streams) -> tuple[Tensor, Tensor]:
    """The loss per token and the gradient of its sum by ``new``."""
    new = given.new.detach().clone().requires_grad_()
    terms = loss(replaced(given, new=new))
    (gradient,) = torch.autograd.grad(terms.loss.sum(), new)
    return terms.loss.detach(), gradient


def replaced(given: Streams, **over: Any) -> Streams:
    names = ("new", "prox", "behave", "advantages", "mask", "ref", "rewards")
    return Streams(**{**{name: getattr(given, name) for name in names}, **over})


@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_the_mask_counts_or_gets_a_gradient(name: str) -> None:
    given = streams()
    loss, gradient = slope(made(name), given)
    assert not loss[~given.mask].any() and not gradient[~given.mask].any()
    assert loss[given.mask].any() and gradient[given.mask].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_what_stands_outside_the_mask_is_never_looked_at(name: str, value: float) -> None:
    given = streams()
    wanted = slope(made(name), given)
    bad = {
        field: torch.where(given.mask, getattr(given, field), torch.tensor(value, dtype=torch.float64))
        for field in ("new", "prox", "behave", "ref", "advantages")
    }
    for got, want in zip(slope(made(name), replaced(given, **bad)), wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["new", "prox", "behave", "ref"])
@pytest.mark.parametrize("value", [-1e4, float("-inf"), -745.0])
def test_a_token_that_one_stream_calls_impossible_gives_finite_numbers(name: str, field: str, value: float) -> None:
    given = streams()
    far = getattr(given, field).clone()
    far[0, 1:3] = value
    mask = given.mask.clone()
    mask[0, 1:3] = True
    loss = made(name)
    values, gradient = slope(loss, replaced(given, mask=mask, **{field: far}))
    assert torch.isfinite(values).all() and torch.isfinite(gradient).all()
    terms = loss(replaced(given, mask=mask, **{field: far}))
    assert all(bool(torch.isfinite(v).all()) for v in (*terms.sums.values(), *terms.peaks.values()))


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_those_of_the_loss_where_it_is_smooth(name: str) -> None:
    given = streams(seed=3, spread=0.02)
    loss = made(name)
    _, gradient = slope(loss, given)
    step = 1e-6
    for row, token in given.mask.nonzero()[:12].tolist():
        shift = torch.zeros_like(given.new)
        shift[row, token] = step
        above, below = (loss(replaced(given, new=given.new + s * shift)).loss.sum() for s in (1, -1))
        assert float((above - below) / (2 * step)) == pytest.approx(float(gradient[row, token]), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_on_the_policy_that_sampled_the_gradient_is_that_of_policy_gradient(name: str) -> None:
    given = streams()
    same = replaced(given, new=given.behave, prox=given.behave, ref=given.behave)
    _, gradient = slope(made(name), same)
    trained = given.mask & (given.advantages != 0)
    assert (torch.sign(gradient[trained]) == -torch.sign(given.advantages[trained])).all()
    if name not in ("gspo", "topr", "sapo"):
        assert torch.allclose(gradient[trained], -given.advantages[trained])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dppo", "ipo")])
def test_no_advantage_no_gradient(name: str) -> None:
    given = streams()
    flat = replaced(given, advantages=torch.zeros_like(given.advantages), ref=given.new)
    values, gradient = slope(made(name), flat)
    assert torch.allclose(gradient, torch.zeros_like(gradient)) and torch.allclose(values, torch.zeros_like(values))


@pytest.mark.parametrize("name", BY_ROW)
def test_rows_do_not_look_at_each_other(name: str) -> None:
    given, loss = streams(), made(name)
    whole = loss(given).loss
    for row in range(ROWS):
        one = {f: getattr(given, f)[row : row + 1] for f in ("new", "prox", "behave", "advantages", "mask", "ref")}
        assert given.rewards is not None
        assert torch.equal(loss(Streams(**one, rewards=given.rewards[row : row + 1])).loss[0], whole[row])


@pytest.mark.parametrize("name", BY_ROW)
def test_figures_add_up_over_rows_and_carry_no_gradient(name: str) -> None:
    given, loss = streams(), made(name)
    whole = loss(replaced(given, new=given.new.clone().requires_grad_()))
    assert not any(v.requires_grad for v in (*whole.sums.values(), *whole.peaks.values()))
    halves = []
    for rows in (slice(0, 2), slice(2, ROWS)):
        part = {f: getattr(given, f)[rows] for f in ("new", "prox", "behave", "advantages", "mask", "ref", "rewards")}
        halves.append(loss(Streams(**part)))
    for key, total in whole.sums.items():
        assert float(sum(half.sums[key] for half in halves)) == pytest.approx(float(total)), key
    for key, peak in whole.peaks.items():
        assert max(float(half.peaks[key]) for half in halves) == pytest.approx(float(peak)), key


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_tells_what_it_clipped_kept_and_how_far_it_is(name: str) -> None:
    given = streams(spread=0.6)
    terms = made(name)(given)
    sums = {key: float(value) for key, value in terms.sums.items()}
    told = {"clip_fraction", "kept_fraction", "prox_kl", "behave_kl/k1", "behave_kl/k3", "ratio/behave", "entropy"}
    assert told | {"ratio/behave_squared", "mismatch_kl", "mismatch/kl"} <= set(sums)
    assert {"mismatch/training_ppl", "mismatch/rollout_ppl"} <= set(terms.rows) and "ratio/max" in terms.peaks
    trained = float(given.mask.sum())
    assert 0 <= sums["clip_fraction"] <= trained and 0 < sums["kept_fraction"] <= trained
    unclipped = ("reinforce", "tis", "sapo", "cispo")
    assert (sums["clip_fraction"] == 0) == (name in unclipped), "ratios are spread beyond every other clip"
    rejecting = made(name, reject=[{"metric": "k2", "upper": 0.02}])(given)
    assert float(rejecting.sums["kept_fraction"]) < sums["kept_fraction"]
    left = (rejecting.loss == 0) & (terms.loss != 0)
    assert left.any() and torch.equal(rejecting.loss[~left], terms.loss[~left]), "the others do not get louder"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_trained_is_zero_and_finite(name: str) -> None:
    given = streams(mask=torch.zeros(ROWS, TOKENS, dtype=torch.bool))
    values, gradient = slope(made(name), given)
    assert not values.any() and not gradient.any()


@pytest.mark.parametrize("name", NAMES)
def test_unknown_and_wrong_options_are_named_with_their_place(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.loss_options\.clip_lwo"):
        made(name, clip_lwo=0.1)
    with pytest.raises(ConfigurationError, match=r"trainer\.loss_options\.log_ratio_limit"):
        made(name, log_ratio_limit="wide")


@pytest.mark.parametrize("away", [-30.0, -2.0, -1e-3, 0.0, 0.5, 30.0])
def test_kl_estimators_are_their_formulas_and_never_explode(away: float) -> None:
    new = torch.tensor([[away - 1.0]], dtype=torch.float64, requires_grad=True)
    ref, mask = torch.tensor([[-1.0]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    found = {kind: kl_per_token(new, ref, mask, kind) for kind in ("k1", "k2", "k3", "abs")}  # type: ignore[arg-type]
    assert found["k1"].item() == pytest.approx(away) and found["abs"].item() == pytest.approx(abs(away))
    assert found["k2"].item() == pytest.approx(away**2 / 2)
    k3 = float(torch.exp(torch.tensor(-max(-20.0, min(20.0, away)), dtype=torch.float64)) - 1) + max(-20, min(20, away))
    assert found["k3"].item() == pytest.approx(min(10.0, k3), abs=1e-12) and found["k3"].item() >= 0
    for value in found.values():
        (gradient,) = torch.autograd.grad(value.sum(), new, retain_graph=True)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("metric", ["ratio", "k1", "k2", "k3", "k3_behave"])
@pytest.mark.parametrize("level", ["token", "segment", "sequence"])
@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
@pytest.mark.parametrize("action", ["clamp", "mask"])
def test_correction_weights_are_bounded_masked_and_without_gradient(
    metric: Any, level: Any, reduce: Any, action: Any
) -> None:
    given = streams(spread=0.8)
    how = Correction(level=level, action=action, metric=metric, reduce=reduce, upper=1.3, lower=0.6)
    prox = given.prox.clone().requires_grad_()
    found = correction_weights(prox, given.behave, given.mask, how)
    assert not found.weight.requires_grad and torch.isfinite(found.weight).all()
    assert not found.weight[~given.mask].any() and not found.kept[~given.mask].any()
    if action == "clamp":
        inside = found.weight[given.mask]
        assert float(inside.min()) >= 0.6 and float(inside.max()) <= 1.3
        assert torch.equal(found.kept, given.mask.double())
    else:
        assert set(found.kept.unique().tolist()) <= {0.0, 1.0}
        assert not found.weight[found.kept == 0].any()
        if metric == "ratio" and level == "token":
            kept = found.weight[found.kept == 1]
            assert float(kept.min()) >= 0.6 and float(kept.max()) <= 1.3
    if level == "sequence":
        for row in range(ROWS):
            assert len(found.kept[row][given.mask[row]].unique()) <= 1, "a sequence is kept whole or not at all"


def test_a_sequence_weight_is_the_product_or_the_geometric_mean() -> None:
    given = streams()
    away = torch.where(given.mask, given.prox - given.behave, 0)
    for product in (True, False):
        how = Correction(level="sequence", upper=1e9, product=product)
        found = correction_weights(given.prox, given.behave, given.mask, how).weight
        for row in (0, 1, 3, 4):
            total = away[row].sum() / (1 if product else given.mask[row].sum())
            assert torch.allclose(found[row][given.mask[row]], total.exp())


def test_normalised_weights_have_mean_one_over_trained_tokens() -> None:
    given = streams(spread=0.5)
    found = correction_weights(given.prox, given.behave, given.mask, Correction(normalize=True)).weight
    assert float(found.sum() / given.mask.sum()) == pytest.approx(1.0)


def test_selection_stops_gradients_of_what_is_not_selected() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    mask = torch.tensor([True, False, False])
    (gradient,) = torch.autograd.grad((select(x, mask) ** 2).sum(), x)
    assert gradient.tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("a", "b", "value"),
    [
        (-1.0, -2.0, 1.0), (-1.0, float("-inf"), 20.0), (float("-inf"), -1.0, -20.0),
        (float("-inf"), float("-inf"), 0.0), (0.0, -100.0, 20.0),
    ],
)  # fmt: skip
def test_log_ratios_are_finite_for_every_input(a: float, b: float, value: float) -> None:
    one = torch.ones(1, dtype=torch.bool)
    assert log_ratio(torch.tensor([a]), torch.tensor([b]), one).item() == value
    assert torch.isfinite(finite_logprobs(torch.tensor([a]), one)).all()


def test_shared_figures_are_their_definitions() -> None:
    given = streams()
    away = (given.new - given.behave)[given.mask]
    found = {name: float(value) for name, value in token_sums(given).items()}
    assert found["behave_kl/k1"] == pytest.approx(float(-away.sum()))
    assert found["behave_kl/k3"] == pytest.approx(float((away.exp() - 1 - away).sum()))
    assert found["ratio/behave"] == pytest.approx(float(away.exp().sum()))
    assert found["ratio/behave_squared"] == pytest.approx(float((2 * away).exp().sum()))
    assert found["entropy"] == pytest.approx(float(-given.new[given.mask].sum()))
