"""How far rollouts run ahead of training, as an operator: a policy's admission depth in batches (protocol 3).

Admission itself is the rule of `credits`: with F fresh groups a batch a policy holds `ceil((1 + d) F)` groups between
their admission and the Step that trains them, d = `depth`, which may be a fraction. `alpha` is the asynchronous ratio
of ROLL Flash (async_generation_ratio), where one number is both: depth and bound of staleness, so `alpha = 1.5` means
depth 1.5 and max_staleness 2; their code refuses ratios below 1 and fractions in part, here both work, and what is
finished first is trained first. Depth 0 is synchronous.
"""

import math
from typing import ClassVar

from pydantic import Field, model_validator

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.prompt_operator import SettingsOperator
from headrace.schemas.config import PolicyConfig

__all__ = ("AdmissionConfiguration", "AdmissionDepth")


class AdmissionConfiguration(OperatorConfiguration):
    """``depth``: batches of groups beyond the one in training. ``alpha``: depth and bound of staleness by one number.
    ``max_staleness``: bound A beside ``depth``; unset, the policy's own.
    """

    depth: float | None = Field(None, ge=0, allow_inf_nan=False)
    alpha: float | None = Field(None, ge=0, allow_inf_nan=False)
    max_staleness: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _one_of_two(self) -> "AdmissionConfiguration":
        if (self.depth is None) == (self.alpha is None):
            raise ValueError("give depth or alpha")
        if self.alpha is not None and self.max_staleness is not None:
            raise ValueError("alpha sets max_staleness too; give depth and max_staleness to choose both")
        return self


class AdmissionDepth(SettingsOperator):
    """Sets ``depth`` and ``max_staleness`` of the policies that it concerns."""

    Configuration: ClassVar[type[OperatorConfiguration]] = AdmissionConfiguration

    def __init__(self, configuration: AdmissionConfiguration) -> None:
        self._given = configuration

    def policy(self, name: str, section: PolicyConfig) -> PolicyConfig:
        """The policy with this depth and bound."""
        given = self._given
        if given.alpha is not None:
            bound = math.ceil(given.alpha) + section.lag
            return section.model_copy(update={"depth": given.alpha, "max_staleness": bound})
        bound = section.max_staleness if given.max_staleness is None else given.max_staleness
        return section.model_copy(update={"depth": given.depth, "max_staleness": bound})
