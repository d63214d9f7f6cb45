"""Serve groups in the order in which they finished, whatever their age; ties go by admission.

Rank = the time at which ``assemble`` closed the group. Short rollouts go first, so under ``drop`` long ones expire more
often (the report says by how much); under ``wait`` the bound puts them in before they would. Source: consumption of
finished samples in AReaL and verl, and AstraFlow's ``fifo``, whose queue is filled in the order of completion.
"""

from typing import ClassVar

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.serving import Candidate, Moment, ServingKind

__all__ = ("FinishedFirst",)


class FinishedFirst:
    """Serves the group that finished first."""

    kind: ClassVar[ServingKind] = "order"
    Configuration: ClassVar[type[OperatorConfiguration]] = OperatorConfiguration

    def __init__(self, configuration: OperatorConfiguration) -> None:
        """Nothing can be set."""

    def rank(self, candidate: Candidate, moment: Moment) -> tuple[float, ...]:
        """By the time of completion."""
        return (candidate.group.closed_ms,)
