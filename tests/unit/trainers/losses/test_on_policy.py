"""Gradients on a policy small enough to write them down: equal at one update, and as each formula says at the fourth.

The policy is a table of logits; tokens are sampled from it, and three noisy steps of plain policy gradient lead away
from the policy that sampled. Every gradient is then a sum of per-token factors times the gradient of a log-prob.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.connectors.plugins import installed, load
from headrace.trainers.losses.loss import Loss, Streams, configured
from headrace.trainers.losses.m2po import M2PO

ROWS, TOKENS, VOCABULARY = 6, 5, 7
EVERY = sorted(installed("headrace.losses"))


def made(name: str, **options: Any) -> Loss:
    loss: Loss = configured(load("headrace.losses", name), options, "trainer.loss_options")
    return loss


class Policy:
    """A table of logits, what it sampled, and the rewards of that."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.start = torch.randn(ROWS, TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)
        flat = self.start.softmax(-1).reshape(-1, VOCABULARY)
        self.tokens = torch.multinomial(flat, 1, generator=generator).reshape(ROWS, TOKENS)
        self.mask = torch.rand(ROWS, TOKENS, generator=generator) < 0.8
        self.rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
        self.advantages = (2 * self.rewards - 1)[:, None].expand(ROWS, TOKENS)

    def logprobs(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, self.tokens[..., None])[..., 0]

    def streams(self, logits: Tensor) -> Streams:
        old = self.logprobs(self.start)
        return Streams(
            new=self.logprobs(logits), prox=old, behave=old, advantages=self.advantages, mask=self.mask,
            rewards=self.rewards,
        )  # fmt: skip

    def gradient(self, loss: Loss, at: Tensor) -> Tensor:
        logits = at.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(self.streams(logits)).loss.sum(), logits)
        return found

    def weighed(self, factors: Tensor, at: Tensor) -> Tensor:
        """The gradient of the sum of ``factors`` times log-probs of trained tokens."""
        logits = at.clone().requires_grad_()
        terms = torch.where(self.mask, factors * self.logprobs(logits), 0)
        (found,) = torch.autograd.grad(terms.sum(), logits)
        return found

    def away(self, updates: int) -> Tensor:
        """The logits after so many noisy steps of plain policy gradient."""
        at, generator = self.start, torch.Generator().manual_seed(1)
        for _ in range(updates):
            noise = torch.randn(at.shape, generator=generator, dtype=at.dtype)
            at = at - 0.1 * self.gradient(made("reinforce"), at) + 0.2 * noise
        return at


POLICY = Policy()
A = POLICY.advantages


def ratio_at(at: Tensor) -> Tensor:
    return (POLICY.logprobs(at) - POLICY.logprobs(POLICY.start)).exp()


def clipped(r: Tensor, low: float, high: float, dual: float = 0.0) -> Tensor:
    free = ~(((A > 0) & (r > 1 + high)) | ((A < 0) & (r < 1 - low)))
    if dual:
        free &= ~((A < 0) & (r > dual))
    return torch.where(free, -A * r, 0)


def mean_of(x: Tensor) -> Tensor:
    lengths = POLICY.mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(POLICY.mask, x, 0).sum(-1, keepdim=True) / lengths


def m2po_factors(r: Tensor) -> Tensor:
    loss = made("m2po")
    assert isinstance(loss, M2PO)
    found = loss.range_of(loss.survey(POLICY.streams(POLICY.away(3)))["squares"])
    return clipped(r, found.low, found.high)


def dppo_factors(r: Tensor, limit: float = 0.2, both: bool = False) -> Tensor:
    old = POLICY.logprobs(POLICY.start)
    rise = (old + r.log()).exp() - old.exp()
    drop = ((A > 0) | both) & (rise > limit) | ((A <= 0) | both) & (rise < -limit)
    return torch.where(drop, 0, -A * r) + 2e-3 * r.log()


def gmpo_factors(r: Tensor) -> Tensor:
    away = r.log()
    bound = away.clamp(-0.4, 0.4)
    inside = torch.where(A > 0, away <= bound, away >= bound)
    taken = torch.where(A > 0, torch.minimum(away, bound), torch.maximum(away, bound))
    return -A * mean_of(taken).exp() * inside


def gate(r: Tensor) -> Tensor:
    tau = torch.where(A > 0, 1.0, 1.05)
    half = torch.sigmoid(tau * (r - 1))
    return -A * 4 * half * (1 - half) * r


FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "ppo": lambda r: clipped(r, 0.2, 0.2, 3.0),
    "grpo": lambda r: clipped(r, 0.2, 0.2, 3.0),
    "decoupled_ppo": lambda r: clipped(r, 0.2, 0.2, 3.0),
    "icepop": lambda r: clipped(r, 0.2, 0.2, 3.0),
    "dapo": lambda r: clipped(r, 0.2, 0.28, 10.0),
    "reinforce": lambda r: -A * torch.ones_like(r),
    "tis": lambda r: -A * torch.ones_like(r),
    "cispo": lambda r: -A * r.clamp(0, 5),
    "topr": lambda r: torch.where(A > 0, -A, -A * r.clamp(max=1)),
    "sapo": gate,
    "gspo": lambda r: clipped(mean_of(r.log()).exp().expand_as(r), 3e-4, 4e-4),
    "gmpo": gmpo_factors,
    "m2po": m2po_factors,
    "dppo": dppo_factors,
    "ipo": lambda r: dppo_factors(r, 0.1, True),
}


@pytest.mark.parametrize("name", EVERY)
def test_at_one_update_all_are_the_plain_policy_gradient(name: str) -> None:
    found = POLICY.gradient(made(name), POLICY.start)
    assert torch.allclose(found, POLICY.weighed(-A, POLICY.start), atol=1e-12)
    assert found.abs().max() > 0.1


@pytest.mark.parametrize("name", sorted(FACTORS))
def test_at_the_fourth_update_the_gradient_is_that_of_the_formula(name: str) -> None:
    at = POLICY.away(3)
    wanted = POLICY.weighed(FACTORS[name](ratio_at(at)), at)
    assert torch.allclose(POLICY.gradient(made(name), at), wanted, atol=1e-12)


def test_at_the_fourth_update_they_differ_where_their_formulas_do() -> None:
    at = POLICY.away(3)
    found = {name: POLICY.gradient(made(name), at) for name in FACTORS}
    same = {frozenset({a, b}) for a in found for b in found if a < b and torch.allclose(found[a], found[b])}
    alike = [("ppo", "grpo", "decoupled_ppo", "icepop"), ("reinforce", "tis")]
    assert same == {frozenset({a, b}) for names in alike for a in names for b in names if a < b}


def test_every_loss_has_its_formula_here() -> None:
    assert set(FACTORS) == set(EVERY)


def test_the_policy_has_gone_far_enough_for_every_clip() -> None:
    r = ratio_at(POLICY.away(3))[POLICY.mask]
    assert float(r.max()) > 1.3 and float(r.min()) < 0.7
    assert int(((r > 0.8) & (r < 1.2)).sum()) > 5
