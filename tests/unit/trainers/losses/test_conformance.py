"""Every shipped loss keeps every promise, and one that breaks a promise is found by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from headrace.connectors.conformance import assert_conforms
from headrace.connectors.plugins import installed
from headrace.trainers.losses.conformance import conformance
from headrace.trainers.losses.loss import LossOptions, LossTerms, Streams, log_ratio, select

SHIPPED = [name for name, entry in installed("headrace.losses").items() if entry.value.startswith("headrace.")]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_loss_conforms(name: str) -> None:
    assert_conforms("losses", name)


class Fine:
    """The least loss."""

    Options: ClassVar[type[LossOptions]] = LossOptions
    corrects_staleness: Any = True
    needs_reference = False

    def __init__(self, options: LossOptions) -> None: ...

    def __call__(self, streams: Streams) -> LossTerms:
        ratio = log_ratio(streams.new, streams.behave, streams.mask).exp()
        return LossTerms(loss=-select(streams.advantages * ratio, streams.mask))


class Undeclared(Fine):
    corrects_staleness = "yes"


class Reduced(Fine):
    def __call__(self, streams: Streams) -> LossTerms:
        return LossTerms(loss=super().__call__(streams).loss.sum())


class Peeking(Fine):
    """Selects after the multiplication, so that NaN gets through."""

    def __call__(self, streams: Streams) -> LossTerms:
        return LossTerms(loss=-streams.advantages * (streams.new - streams.behave).exp() * streams.mask)


class Unclamped(Fine):
    def __call__(self, streams: Streams) -> LossTerms:
        away = select(streams.new, streams.mask) - select(streams.behave, streams.mask)
        return LossTerms(loss=-select(streams.advantages * away.exp(), streams.mask))


class Mixing(Fine):
    """Divides by the tokens of the micro-batch."""

    def __call__(self, streams: Streams) -> LossTerms:
        return LossTerms(loss=super().__call__(streams).loss / streams.mask.sum().clamp(min=1))


class Backwards(Fine):
    def __call__(self, streams: Streams) -> LossTerms:
        return replace(terms := super().__call__(streams), loss=-terms.loss)


class Drawing(Fine):
    def __call__(self, streams: Streams) -> LossTerms:
        loss = super().__call__(streams).loss
        return LossTerms(loss=loss * torch.rand(1))


@pytest.mark.parametrize(
    ("cls", "broken", "says"),
    [
        (Fine, set(), ""),
        (Undeclared, {"declared"}, "corrects_staleness is 'yes'"),
        (Reduced, {"per_token"}, "its shape is ()"),
        (Peeking, {"masked"}, "nan at masked positions changes the loss"),
        (Unclamped, {"extremes"}, "not finite for log ratios of about 1"),
        (Mixing, {"splits"}, "alone has another loss"),
        (Backwards, {"direction"}, "moves the wrong way"),
        (Drawing, {"determinism", "masked"}, "called again it gives another loss"),
    ],
)
def test_a_broken_promise_is_found(cls: type[Fine], broken: set[str], says: str) -> None:
    checks = conformance(f"{__name__}:{cls.__name__}", {})
    found = {check.name: check.detail for check in checks if not check.passed}
    assert broken <= set(found) and bool(found) == bool(broken), found
    assert not broken or any(says in detail for detail in found.values()), found
