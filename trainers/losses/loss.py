"""The contract of a policy loss: three named log-prob streams in, a per-token loss and sums of its metrics out.

A loss is a pure function of its streams. It never reduces over tokens or sequences (``aggregation`` does, by global
counts), so its value does not depend on how a batch is split into micro-batches or ranks (docs/losses.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from headrace.schemas.errors import ConfigurationError

__all__ = (
    "FAR",
    "Loss",
    "LossOptions",
    "LossTerms",
    "Streams",
    "Survey",
    "Surveying",
    "configured",
    "finite_logprobs",
    "log_ratio",
    "select",
    "token_sums",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The inputs of a loss, all of shape [sequences, tokens], log-probs in nats.

    new: of the policy being trained, carries the gradient. prox: of the policy at the start of the step. behave: as
    sampled, possibly by several versions. ref: of a frozen reference, if the loss asks for one. advantages: one value
    per token. mask: bool, True on trained tokens; what stands at other positions is never looked at. rewards: raw, of
    the trajectory, [sequences].
    """

    new: Tensor
    prox: Tensor
    behave: Tensor
    advantages: Tensor
    mask: Tensor
    ref: Tensor | None = None
    rewards: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What a loss gives: the loss per token (0 outside the mask) and figures that add up over micro-batches and ranks.

    sums: sums over trained tokens; divided by the global count of tokens they become metrics. rows: sums over
    sequences with a trained token, divided by their global count. peaks: maxima.
    """

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    peaks: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)


class LossOptions(BaseModel):
    """``trainer.loss_options``: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    log_ratio_limit: float = Field(20.0, gt=0, le=80)
    """Log ratios are clamped to plus and minus this before ``exp``, which is infinite from 89 on in float32."""


class Loss(Protocol):
    """A policy loss; found by name in the entry point group ``headrace.losses`` as a class made from its Options."""

    Options: ClassVar[type[LossOptions]]

    @property
    def corrects_staleness(self) -> bool:
        """True when data sampled by older policies is corrected for; else asynchronous data is refused."""
        ...

    @property
    def needs_reference(self) -> bool:
        """True when ``Streams.ref`` must be given."""
        ...

    def __call__(self, streams: Streams) -> LossTerms:
        """The loss per token, to be minimised."""
        ...


Survey = Mapping[str, Tensor]
"""One-dimensional tensors by name; those of all micro-batches and ranks of an update are put one after the other."""


@runtime_checkable
class Surveying(Protocol):
    """A loss with figures of a whole update, such as a threshold over all its tokens.

    Called without ``fitted`` it takes the given rows for the whole update. The order of what a survey holds must not
    matter, so that the figures are the same however the update is split over micro-batches and ranks.
    """

    @property
    def surveys(self) -> bool:
        """False when, as configured, there is no such figure and both methods are left out."""
        ...

    def survey(self, streams: Streams) -> Survey:
        """What the figures follow from, of these rows; ``streams.new`` carries no gradient."""
        ...

    def fitted(self, survey: Survey) -> Loss:
        """This loss with the figures that the survey of the whole update gives."""
        ...


FAR = 1e4
"""Bound of log ratios where nothing exponential follows."""


def configured(cls: Any, options: Mapping[str, Any], where: str) -> Any:
    """A plug-in of class ``cls`` from its options. Raises ConfigurationError that names the key below ``where``."""
    try:
        return cls(cls.Options(**options))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([where, *(str(part) for part in first["loc"])])
        valid = ", ".join(cls.Options.model_fields)
        raise ConfigurationError(f"{key}: {first['msg']}; {cls.__name__} knows {valid}") from error


def select(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where the mask is True, else 0; neither value nor gradient of the other positions gets through."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def log_ratio(a: Tensor, b: Tensor, mask: Tensor, limit: float = 20.0) -> Tensor:
    """``a - b`` where the mask is True, else 0, clamped to plus and minus ``limit``; finite for every input.

    -inf minus -inf counts as 0. The selection comes before anything non-linear, so masked positions give no NaN.
    """
    difference = torch.nan_to_num(select(a, mask) - select(b, mask), nan=0.0)
    return difference.clamp(-limit, limit)


def finite_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log-probs where the mask is True, else 0; -inf becomes -10,000 without a gradient."""
    return torch.nan_to_num(select(logprobs, mask), nan=0.0, neginf=-1e4)


def token_sums(streams: Streams, limit: float = 20.0) -> dict[str, Tensor]:
    """Sums that every loss reports: KL of behave to new (k1, k3), ratio new/behave and its square, and entropy.

    ``entropy`` is estimated from the sampled tokens (the mean of ``-new``); effective sample size and chi-squared
    follow from ``ratio/behave`` and ``ratio/behave_squared``.
    """
    with torch.no_grad():
        away = log_ratio(streams.new, streams.behave, streams.mask, limit)
        ratio = select(away.exp(), streams.mask)
        return {
            "behave_kl/k1": -away.sum(),
            "behave_kl/k3": select(ratio - 1 - away, streams.mask).sum(),
            "ratio/behave": ratio.sum(),
            "ratio/behave_squared": (ratio * ratio).sum(),
            "entropy": -finite_logprobs(streams.new, streams.mask).sum(),
        }
