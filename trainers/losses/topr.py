"""TOPR: positive examples as they are, negative ones weighted by their ratio truncated at 1."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.losses.anchored import Anchored, AnchoredOptions, Surrogate
from headrace.trainers.losses.loss import LossOptions, Streams, finite_logprobs, select

__all__ = ("TOPR", "TOPROptions")


class TOPROptions(AnchoredOptions):
    """positive_weight, negative_weight: of examples with a raw reward above 0, and of the others."""

    anchor: Literal["prox", "behave"] = "behave"
    positive_weight: float = Field(1.0, ge=0)
    negative_weight: float = Field(1.0, ge=0)


class TOPR(Anchored):
    """``-A log(new)`` where the raw reward is above 0, else ``-clip(r, 0, 1) A log(new)``; token by token."""

    Options: ClassVar[type[LossOptions]] = TOPROptions

    def __init__(self, options: TOPROptions) -> None:
        super().__init__(options)
        self.options = options

    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """See ``Anchored``."""
        if streams.rewards is None:
            raise ConfigurationError("TOPR tells examples apart by their rewards, and none were given")
        positive = (streams.rewards > 0)[:, None].to(away.dtype)
        truncated = away.detach().exp().clamp(max=1.0)
        weight = self.options.positive_weight * positive + self.options.negative_weight * (1 - positive) * truncated
        loss = -weight * select(streams.advantages, streams.mask) * finite_logprobs(streams.new, streams.mask)
        clipped = select((1 - positive) * (away.detach() > 0), streams.mask)
        return Surrogate(loss=loss, sums={"clip_fraction": clipped.sum()})
