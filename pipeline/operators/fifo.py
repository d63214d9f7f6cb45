"""Serve groups in the order of their admission: the prompts' own order, as far as their groups have finished.

Rank = group id, which ``schedule`` issues in rising order. A group that is not finished holds nobody up; under ``wait``
the bound may put older groups before. Source: consumption in start order, as ROLL's ReplayBuffer does it.
"""

from typing import ClassVar

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.serving import Candidate, Moment, ServingKind

__all__ = ("AdmissionOrder",)


class AdmissionOrder:
    """Serves the group that was admitted first."""

    kind: ClassVar[ServingKind] = "order"
    Configuration: ClassVar[type[OperatorConfiguration]] = OperatorConfiguration

    def __init__(self, configuration: OperatorConfiguration) -> None:
        """Nothing can be set."""

    def rank(self, candidate: Candidate, moment: Moment) -> tuple[float, ...]:
        """By admission."""
        return (candidate.group.group,)
