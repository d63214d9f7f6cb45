"""Decoupled PPO: the clip is on new / prox, a weight prox / behave accounts for staleness (docs/losses.md).

Three named streams go in: behave (as sampled, any mix of versions), prox (the policy at the start of the step) and new.
"""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from headrace.trainers.losses.correction import Correction
from headrace.trainers.losses.loss import LossOptions
from headrace.trainers.losses.ppo import PPO, PPOOptions

__all__ = ("DecoupledPPO", "DecoupledPPOOptions")


class DecoupledPPOOptions(PPOOptions):
    """PPO's options with the anchor fixed; behave: how prox / behave becomes the weight, by default clamped to 2."""

    anchor: Literal["prox"] = "prox"
    behave: Correction = Correction()

    @model_validator(mode="after")
    def _one_weight(self) -> Self:
        if "correction" in self.model_fields_set:
            raise ValueError("decoupled_ppo calls the correction `behave`")
        return self


class DecoupledPPO(PPO):
    """``max(-A r, -A clip(r)) * rho`` with r = new / prox and rho = prox / behave, masked or clamped at its cap.

    At one update per batch prox equals new in value, so the gradient is that of ``-A rho log(new)``; the clip acts from
    the second update on. The weight is also the correction of engine mismatch, which is why it is on at every depth.
    """

    Options: ClassVar[type[LossOptions]] = DecoupledPPOOptions

    def __init__(self, options: DecoupledPPOOptions) -> None:
        super().__init__(options.model_copy(update={"correction": options.behave}))
