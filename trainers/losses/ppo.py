"""PPO's clipped loss on the ratio new / prox or new / behave, with the engine-mismatch correction."""

from typing import ClassVar

from torch import Tensor

from headrace.trainers.losses.anchored import Anchored, AnchoredOptions, Surrogate
from headrace.trainers.losses.clip import ClipOptions, clipped_surrogate
from headrace.trainers.losses.loss import LossOptions, Streams

__all__ = ("PPO", "PPOOptions")


class PPOOptions(AnchoredOptions, ClipOptions):
    """Anchor, correction, clip range and dual clip."""


class PPO(Anchored):
    """``max(-A r, -A clip(r)) * w``: w truncates prox / behave when r is new / prox.

    With the anchor ``behave`` the ratio itself carries the correction, and w is 1.
    """

    Options: ClassVar[type[LossOptions]] = PPOOptions

    def __init__(self, options: PPOOptions) -> None:
        super().__init__(options)
        self.options = options

    def surrogate(self, away: Tensor, streams: Streams) -> Surrogate:
        """See ``Anchored``."""
        part = clipped_surrogate(away, streams.advantages, streams.mask, self.options)
        return Surrogate(loss=part.loss, sums=part.sums())
