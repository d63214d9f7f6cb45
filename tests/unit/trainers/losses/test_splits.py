"""Losses and gradients are the same however an update is split into micro-batches and ranks: exactly, for every loss.

A split here is any partition of the rows; figures of the whole update (thresholds of M2PO, mean weights) are surveyed
part by part, in any order, and fixed before the losses are taken.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.connectors.plugins import installed, load
from headrace.trainers.losses.aggregation import MODES, Denominators, aggregate
from headrace.trainers.losses.loss import Loss, Streams, Surveying, configured

NAMES = ("new", "prox", "behave", "advantages", "mask", "ref", "rewards")
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in sorted(installed("headrace.losses"))),
    ("m2po", {"variant": "official", "budget": 0.01}),
    ("m2po", {"variant": "areal", "budget": 0.01}),
    ("m2po", {"variant": "areal", "budget": 0.02, "correction": {"normalize": True}}),
    ("ppo", {"correction": {"level": "sequence", "product": True, "upper": 1.1}}),
    ("ppo", {"correction": {"level": "sequence", "action": "mask", "metric": "k3", "reduce": "max", "upper": 0.02}}),
    ("ppo", {"reject": [{"level": "sequence", "metric": "k2", "upper": 0.02}], "sequence_mask": 0.01}),
    ("tis", {"correction": {"level": "sequence", "product": True, "normalize": True}}),
    ("decoupled_ppo", {"behave": {"normalize": True, "upper": 1.2}, "kl_weight": 0.1}),
]


def made(name: str, options: dict[str, Any]) -> Loss:
    loss: Loss = configured(load("headrace.losses", name), options, "trainer.loss_options")
    return loss


def streams_of(rows: int, seed: int) -> Streams:
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(rows, 6, generator=generator, dtype=torch.float64)

    behave = -1 - torch.rand(rows, 6, generator=generator, dtype=torch.float64)
    rewards = torch.randint(0, 2, (rows,), generator=generator).double()
    return Streams(
        new=behave + noise(0.2), prox=behave + noise(0.15), behave=behave, ref=behave + noise(0.3),
        mask=torch.rand(rows, 6, generator=generator) < 0.7, rewards=rewards,
        advantages=(2 * rewards - 1)[:, None] + noise(0.1),
    )  # fmt: skip


def part_of(given: Streams, rows: list[int], new: Tensor) -> Streams:
    fields = {name: getattr(given, name)[rows] for name in NAMES if name != "new"}
    return Streams(**fields, new=new[rows])


def split_loss(loss: Loss, given: Streams, parts: list[list[int]], mode: Any) -> tuple[float, Tensor]:
    """The loss and its gradient when every part is taken for itself."""
    counts = Denominators(tokens=int(given.mask.sum()), sequences=int(given.mask.any(-1).sum()), constant=6.0)
    new = given.new.clone().requires_grad_()
    if isinstance(loss, Surveying) and loss.surveys:
        found = [loss.survey(part_of(given, rows, given.new)) for rows in parts]
        loss = loss.fitted({name: torch.cat([survey[name] for survey in found]) for name in found[0]})
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        part = part_of(given, rows, new)
        total = total + aggregate(loss(part).loss, part.mask, mode, counts)
    (gradient,) = torch.autograd.grad(total, new)
    return float(total.detach()), gradient


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 9), seed=st.integers(0, 99), mode=st.sampled_from(MODES), data=st.data())
def test_any_split_gives_the_same_loss_and_gradient(
    name: str, options: dict[str, Any], rows: int, seed: int, mode: Any, data: st.DataObject
) -> None:
    given, loss = streams_of(rows, seed), made(name, options)
    order = data.draw(st.permutations(range(rows)))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, rows - 1)), max_size=rows)))
    edges = [0, *(cut for cut in cuts if cut < rows), rows]
    parts = [list(order[a:b]) for a, b in pairwise(edges)]
    wanted, slope = split_loss(loss, given, [list(range(rows))], mode)
    found, other = split_loss(loss, given, parts, mode)
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-14)
    assert torch.allclose(other, slope, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_unfitted_a_loss_takes_the_rows_for_the_whole_update(name: str, options: dict[str, Any]) -> None:
    given, loss = streams_of(8, 5), made(name, options)
    new = given.new.clone().requires_grad_()
    whole = loss(part_of(given, list(range(8)), new)).loss
    counts = Denominators(tokens=int(given.mask.sum()), sequences=8, constant=6.0)
    (gradient,) = torch.autograd.grad(aggregate(whole, given.mask, "token-mean", counts), new)
    _, slope = split_loss(loss, given, [[at] for at in range(8)], "token-mean")
    assert torch.allclose(gradient, slope, rtol=1e-12, atol=1e-14)


def test_a_bound_taken_for_each_part_alone_would_give_another_loss() -> None:
    """So the property above can fail: this is what it guards against."""
    given, loss = streams_of(8, 5), made("m2po", {"budget": 0.01})
    counts = Denominators(tokens=int(given.mask.sum()), sequences=8, constant=6.0)
    alone = sum(
        float(aggregate(loss(part).loss, part.mask, "token-mean", counts))
        for at in range(8)
        for part in [part_of(given, [at], given.new)]
    )
    assert alone != pytest.approx(split_loss(loss, given, [list(range(8))], "token-mean")[0], rel=1e-3)
