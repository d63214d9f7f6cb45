"""What an operator at serving is: one decision of ``batch`` about whole kept groups of one policy (protocol 4).

In: candidates, which are kept or pooled groups, and the batch that is being composed. Out: a refusal, a choice, a rank,
or lanes. Serving operators are functions of what they are given: what has to be remembered (uses, order of first use)
is kept and restored by ``batch``, so the same groups always make the same batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.schemas.records import Group

__all__ = ("Candidate", "Moment", "Order", "Placement", "Replaying", "ServingKind", "StalenessRule")

ServingKind = Literal["staleness", "replay", "order", "batch"]
"""``staleness`` refuses groups, ``replay`` chooses used ones, ``order`` ranks fresh ones, ``batch`` places into lanes.

One of each kind at most per policy, in this order: what is refused is not ranked, and lanes come last.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A group that may be served. ``group.group`` rises in the order of admission, ``group.closed_ms`` of completion.

    uses: batches that had it. entered, last_used: numbers that rise with the first and the newest use; 0 for a fresh
    group.
    """

    group: Group
    uses: int = 0
    entered: int = 0
    last_used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The batch that is composed: the run's seed, the policy's name, its number, its start version, the bound A."""

    seed: int
    policy: str
    batch: int
    start_version: int
    bound: int


class StalenessRule(Protocol):
    """Kind ``staleness``. ``batch`` holds the policy's bound A whatever a rule says; a rule can only be stricter."""

    kind: ClassVar[ServingKind]
    Configuration: ClassVar[type[OperatorConfiguration]]

    def refusal(self, candidate: Candidate, moment: Moment) -> str:
        """Empty for a group that may be served, else ``reason_in_words: numbers``. A fresh group closes as stale then;
        one of the pool is not replayed in this batch.
        """
        ...


class Replaying(Protocol):
    """Kind ``replay``. How many are replayed follows from the policy's replay share; which ones, from this."""

    kind: ClassVar[ServingKind]
    Configuration: ClassVar[type[OperatorConfiguration]]

    def capacity(self, batch_groups: int) -> int:
        """Groups that the pool holds at most; the first to enter leave first."""
        ...

    def choose(self, pool: Sequence[Candidate], count: int, moment: Moment) -> Sequence[int]:
        """Numbers of ``count`` different groups of the pool at most, in the order in which they are to be served.

        pool: groups within the bound that no rule refuses, the longest unused first; count: at least 1.
        """
        ...


class Order(Protocol):
    """Kind ``order``."""

    kind: ClassVar[ServingKind]
    Configuration: ClassVar[type[OperatorConfiguration]]

    def rank(self, candidate: Candidate, moment: Moment) -> tuple[float, ...]:
        """Where a fresh group stands: the smallest is served first, ties go by admission."""
        ...


class Placement(Protocol):
    """Kind ``batch``."""

    kind: ClassVar[ServingKind]
    Configuration: ClassVar[type[OperatorConfiguration]]

    def place(self, groups: Sequence[Candidate], lanes: int) -> Sequence[int]:
        """The lane, 0 to ``lanes`` - 1, of each group."""
        ...
