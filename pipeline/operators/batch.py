"""Spread the groups of a batch over its lanes: whole groups, and lanes as equal as a greedy choice makes them.

Largest group first, each to the lane with the least so far (longest processing time first, Graham 1969: the largest
lane is at most 4/3 - 1/(3 lanes) times the best possible). Weight = trained tokens, trained members, or 1, as
``balance`` says. A rank of the trainer reads whole lanes, so it sees all members of a group.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.serving import Candidate, ServingKind
from headrace.schemas.records import Group

__all__ = ("Batch", "BatchConfiguration")


class BatchConfiguration(OperatorConfiguration):
    """``balance``: what lanes are to hold equally much of: trained ``tokens``, trained ``members``, or ``groups``."""

    balance: Literal["tokens", "members", "groups"] = "tokens"


_WEIGHTS: dict[str, Callable[[Group], int]] = {
    "tokens": lambda group: group.tokens,
    "members": lambda group: group.trained,
    "groups": lambda _: 1,
}


class Batch:
    """Places whole groups into lanes, the lanes balanced by trained tokens."""

    kind: ClassVar[ServingKind] = "batch"
    Configuration: ClassVar[type[OperatorConfiguration]] = BatchConfiguration

    def __init__(self, configuration: BatchConfiguration) -> None:
        self._weight = _WEIGHTS[configuration.balance]

    def place(self, groups: Sequence[Candidate], lanes: int) -> Sequence[int]:
        """Largest first, each to the lightest lane; ties go to the earlier group and the lower lane."""
        weights = [self._weight(c.group) for c in groups]
        loads = [(0, lane) for lane in range(lanes)]
        out = [0] * len(groups)
        for number in sorted(range(len(groups)), key=lambda n: (-weights[n], n)):
            load, lane = min(loads)
            out[number] = lane
            loads[lane] = (load + weights[number], lane)
        return out
