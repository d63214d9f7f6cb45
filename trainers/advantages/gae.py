"""Generalized advantage estimation with a critic, for PPO proper: observations between turns are skipped."""

from typing import ClassVar

from pydantic import Field

from headrace.trainers.advantages.advantage import AdvantageOptions, Floats, Needs
from headrace.trainers.advantages.returns import Returns, ReturnsOptions
from headrace.trainers.advantages.tokens import generalized

__all__ = ("GAE", "GAEOptions")


class GAEOptions(ReturnsOptions):
    """lam: how far differences of values are trusted beyond the next token; 1 takes the return less the value."""

    lam: float = Field(0.95, ge=0, le=1)


class GAE(Returns):
    """``A_t = d_t + gamma lam A_(t+1)``, whitened; the critic is trained towards ``A_t + V_t`` before whitening."""

    Options: ClassVar[type[AdvantageOptions]] = GAEOptions

    def __init__(self, options: GAEOptions) -> None:
        super().__init__(options)
        self.options = options

    @property
    def needs(self) -> Needs:
        """The values of a critic, and the KL to a reference where tokens pay for it."""
        return Needs(values=True, kl=super().needs.kl)

    def chain(self, rewards: Floats, values: Floats) -> tuple[Floats, Floats]:
        """See ``Returns``."""
        advantages = generalized(rewards, values, self.options.gamma, self.options.lam)
        return advantages, advantages + values
