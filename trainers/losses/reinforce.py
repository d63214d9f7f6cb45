"""REINFORCE: the plain policy gradient, weighted by a truncated prox / behave ratio."""

from torch import Tensor

from headrace.trainers.losses.anchored import Anchored, Surrogate
from headrace.trainers.losses.loss import Streams, finite_logprobs, select

__all__ = ("Reinforce",)


class Reinforce(Anchored):
    """``-A log(new) * w``; the ratio has no part in it, so the anchor must stay ``prox`` for the correction to act."""

    @property
    def corrects_staleness(self) -> bool:
        """True whenever the correction acts."""
        return self.anchoring.anchor == "prox" and self.anchoring.correction.action != "off"

    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """See ``Anchored``."""
        return Surrogate(loss=-select(streams.advantages, streams.mask) * finite_logprobs(streams.new, streams.mask))
