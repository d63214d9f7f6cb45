"""What every loss must keep, tried on streams of all sorts: per token, finite, blind to masked positions and to splits.

In: a name or ``module:Class`` with its options. Out: one ``Check`` for every promise of ``loss.Loss``. Streams are
seeded; among them are log-probs of -inf, ratios beyond every clip, rows without a trained token, and noise, infinities
and NaN wherever the mask is False.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from headrace.connectors.conformance import Check, attempt
from headrace.connectors.plugins import load
from headrace.trainers.losses.loss import Loss, LossTerms, Streams, Surveying, configured

__all__ = ("conformance", "streams_of")

ROWS, TOKENS = 6, 9


def conformance(name: str, settings: Mapping[str, Any]) -> list[Check]:
    """Try a loss. Raises ConfigurationError for an unknown name and options that it refuses."""
    loss: Loss = configured(load("headrace.losses", name), settings, "trainer.loss_options")
    return [
        attempt("declared", lambda: _declared(loss)),
        attempt("per_token", lambda: _per_token(loss)),
        attempt("masked", lambda: _masked(loss)),
        attempt("extremes", lambda: _extremes(loss)),
        attempt("splits", lambda: _splits(loss)),
        attempt("direction", lambda: _direction(loss)),
        attempt("determinism", lambda: _same(loss)),
    ]


def streams_of(seed: int, spread: float = 0.3) -> Streams:
    """Streams of six rows of nine tokens; the last row has no trained token. ``spread``: deviation of log ratios."""
    random = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(ROWS, TOKENS, generator=random, dtype=torch.float64)

    prox = -normal(1.0).abs() - 0.1
    mask = torch.rand(ROWS, TOKENS, generator=random) < 0.7
    mask[:, 0], mask[:-1, 1], mask[-1] = False, True, False
    return Streams(
        new=(prox + normal(spread)).requires_grad_(), prox=prox, behave=prox + normal(spread),
        ref=prox + normal(spread), mask=mask, advantages=normal(1.0)[:, :1].expand(ROWS, TOKENS).clone(),
        rewards=torch.randint(0, 2, (ROWS,), generator=random).double(),
    )  # fmt: skip


def _called(loss: Loss, streams: Streams) -> LossTerms:
    """The loss with the figures of the whole update, where it has some."""
    if isinstance(loss, Surveying) and loss.surveys:
        with torch.no_grad():
            survey = loss.survey(replace(streams, new=streams.new.detach()))
        loss = loss.fitted(survey)
    return loss(streams)


def _gradient(loss: Loss, streams: Streams) -> tuple[torch.Tensor, torch.Tensor]:
    new = streams.new.detach().clone().requires_grad_()
    terms = _called(loss, replace(streams, new=new))
    total = terms.loss.sum()
    if not total.requires_grad:  # nothing of it depends on the policy
        return terms.loss.detach(), torch.zeros_like(new)
    (gradient,) = torch.autograd.grad(total, new, allow_unused=True)
    return terms.loss.detach(), torch.zeros_like(new) if gradient is None else gradient


def _declared(loss: Loss) -> str:
    for word in ("corrects_staleness", "needs_reference"):
        value = getattr(loss, word, None)
        assert isinstance(value, bool), f"{word} is {value!r}: it must be True or False"
    stale = "corrects staleness" if loss.corrects_staleness else "takes data of its own version only"
    return f"{stale}, {'needs a' if loss.needs_reference else 'no'} reference"


def _per_token(loss: Loss) -> str:
    streams = streams_of(0)
    terms = _called(loss, streams)
    assert tuple(terms.loss.shape) == (ROWS, TOKENS), f"its shape is {tuple(terms.loss.shape)}, not [sequences, tokens]"
    assert not terms.loss[~streams.mask].any(), "it is not 0 outside the mask"
    figures = {**terms.sums, **terms.peaks, **terms.rows}
    odd = [key for key, value in figures.items() if value.numel() != 1 or not bool(torch.isfinite(value))]
    assert not odd, f"the figure {odd[0]} is no finite number"
    kept = [key for key, value in figures.items() if value.requires_grad]
    assert not kept, f"the figure {kept[0]} carries a gradient; detach it"
    return f"[{ROWS}, {TOKENS}], 0 outside the mask; figures: {', '.join(sorted(figures)) or 'none'}"


def _masked(loss: Loss) -> str:
    streams = streams_of(1)
    value, gradient = _gradient(loss, streams)
    assert not gradient[~streams.mask].any(), "its gradient is not 0 at masked positions"
    for junk in (float("nan"), float("inf"), -float("inf"), 1e9):
        spoil = torch.tensor(junk).double()
        spoilt = {
            name: torch.where(streams.mask, getattr(streams, name).detach(), spoil)
            for name in ("new", "prox", "behave", "ref", "advantages")
        }
        other, moved = _gradient(loss, replace(streams, **spoilt))
        assert torch.equal(value, other), f"{junk} at masked positions changes the loss"
        assert torch.equal(gradient, moved), f"{junk} at masked positions changes the gradient"
    return "nothing at masked positions gets through, NaN and infinities included"


def _extremes(loss: Loss) -> str:
    for spread in (0.0, 5.0, 50.0, 1e4):
        value, gradient = _gradient(loss, streams_of(2, spread))
        assert bool(torch.isfinite(value).all()), f"it is not finite for log ratios of about {spread:g}"
        assert bool(torch.isfinite(gradient).all()), f"its gradient is not finite for log ratios of about {spread:g}"
    streams = streams_of(3)
    impossible = replace(streams, behave=torch.full_like(streams.behave, -float("inf")))
    value, gradient = _gradient(loss, impossible)
    assert bool(torch.isfinite(value).all() and torch.isfinite(gradient).all()), "-inf as behave log-prob breaks it"
    return "loss and gradient are finite for log ratios up to 10,000 and behave log-probs of -inf"


def _splits(loss: Loss) -> str:
    """Rows by themselves give what they give together: a micro-batch must not matter."""
    streams = streams_of(4)
    whole = _called(loss, streams).loss.detach()
    if isinstance(loss, Surveying) and loss.surveys:
        with torch.no_grad():
            loss = loss.fitted(loss.survey(replace(streams, new=streams.new.detach())))
    for row in range(ROWS):
        part = slice(row, row + 1)
        names = ("new", "prox", "behave", "ref", "advantages", "mask", "rewards")
        alone = loss(replace(streams, **{n: getattr(streams, n)[part] for n in names})).loss.detach()
        assert torch.allclose(alone, whole[part], rtol=1e-9, atol=1e-12), f"row {row} alone has another loss"
    return "a row has the same loss alone and among others"


def _direction(loss: Loss) -> str:
    """With all streams equal and an advantage, one step down the gradient makes the right tokens likelier."""
    streams = streams_of(5, 0.0)
    for sign in (1.0, -1.0):
        rewards = torch.full((ROWS,), max(sign, 0.0)).double()
        advantages = torch.full_like(streams.prox, sign)
        _, gradient = _gradient(loss, replace(streams, advantages=advantages, rewards=rewards))
        pull = -sign * gradient[streams.mask]
        assert bool((pull >= -1e-9).all()), f"with an advantage of {sign:g} a token moves the wrong way"
        if sign > 0:
            assert bool((pull > 0).any()), "a positive advantage has no gradient at all"
    return "on its own data a positive advantage makes tokens likelier, a negative one does not"


def _same(loss: Loss) -> str:
    one, other = _gradient(loss, streams_of(6)), _gradient(loss, streams_of(6))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]), "called again it gives another loss"
    return "the same loss and gradient when it is called again"
