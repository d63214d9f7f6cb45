"""Serve the group with the earliest last chance first; ties go by admission.

Last chance of a group = oldest version + A + 1, in batch numbers (protocol 4), so the oldest version ranks. The order
in force where none is named. Source: earliest deadline first as in AstraFlow's queue (commit 7ce9f33), where it saves
long rollouts that first in, first out lets expire; there an overflowing queue evicts the most urgent sample, here
admission bounds what is kept and nothing is evicted.
"""

from typing import ClassVar

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.serving import Candidate, Moment, ServingKind

__all__ = ("EarliestDeadline",)


class EarliestDeadline:
    """Serves the group that would pass the bound first."""

    kind: ClassVar[ServingKind] = "order"
    Configuration: ClassVar[type[OperatorConfiguration]] = OperatorConfiguration

    def __init__(self, configuration: OperatorConfiguration) -> None:
        """Nothing can be set."""

    def rank(self, candidate: Candidate, moment: Moment) -> tuple[float, ...]:
        """By the oldest trained version."""
        return (candidate.group.oldest_version,)
