"""Where a trainer goes on: a decision over the store's head, the ``steps`` topic and the checkpoints (protocol 8).

Pure. The checkpoint alone decides where training resumes; (lineage, batch) are compared, never version numbers. What is
published stays published, and a batch that has a Step is retrained without publishing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Record, Resumed, Rollback, Step, Stop

__all__ = (
    "Announcement",
    "Plan",
    "Point",
    "StepsSeen",
    "ancestry",
    "check_version",
    "decide",
    "rollback_base",
    "seen_in",
)

Announcement = Literal["Step", "Resumed"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Point:
    """A state of the weights: the batch that made it, within a lineage; ``version`` as it was or will be published."""

    lineage: int
    batch: int
    version: int = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsSeen:
    """What the ``steps`` topic says of a policy: stopped, its Rollbacks in order, versions with a Step or Resumed."""

    stopped: bool = False
    rollbacks: tuple[Rollback, ...] = ()
    announced: frozenset[int] = frozenset()

    @property
    def rollback(self) -> Rollback | None:
        """The last Rollback."""
        return self.rollbacks[-1] if self.rollbacks else None

    @property
    def lineage(self) -> int:
        """The lineage in force."""
        return self.rollback.lineage if self.rollback else 0

    @property
    def base(self) -> Point | None:
        """The state that the lineage in force starts from; None in the first lineage."""
        back = self.rollback
        if back is None:
            return None
        return Point(lineage=back.base_lineage, batch=back.base_batch, version=back.base_version)


def seen_in(records: Iterable[Record]) -> StepsSeen:
    """The state that a policy's records of ``steps`` lead to, in their order."""
    stopped, rollbacks, announced = False, list[Rollback](), set()
    for record in records:
        if isinstance(record, Stop):
            stopped = True
        elif isinstance(record, Rollback):
            rollbacks.append(record)
        elif isinstance(record, Step | Resumed):
            announced.add(record.version)
    return StepsSeen(stopped=stopped, rollbacks=tuple(rollbacks), announced=frozenset(announced))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do at a start, in this order.

    stopped: nothing, exit. first: publish the initial weights as version 0. start: the checkpoint to load, None for the
    initial weights. announce: the head lacks its record, write it. retrain_to: train the batches after ``start_batch``
    up to this one without publishing. publish: then publish the weights at head + 1 with this announcement.
    """

    stopped: bool = False
    first: bool = False
    lineage: int = 0
    start: Point | None = None
    publish: Announcement | None = None
    retrain_to: int = 0
    announce: Announcement | None = None

    @property
    def start_batch(self) -> int:
        """The last batch in the loaded weights."""
        return self.start.batch if self.start else 0


def decide(seen: StepsSeen, head: Point | None, checkpoints: Sequence[Point]) -> Plan:
    """The plan of a start. Raises ConfigurationError when store, topic and checkpoints cannot belong together."""
    if seen.stopped:
        return Plan(stopped=True)
    if head is None:
        if checkpoints or seen.announced:
            raise ConfigurationError(
                f"the store has no version of this policy, but there are {len(checkpoints)} checkpoints and "
                f"{len(seen.announced)} steps of it: is store.url the one that the run began with?"
            )
        return Plan(first=True)
    lineage = seen.lineage
    start = max(ancestry(seen, checkpoints), default=None)
    batch = start.batch if start else 0
    if head.lineage > lineage:
        raise ConfigurationError(
            f"the store's head has lineage {head.lineage}, the steps topic knows {lineage}: store and topics are of "
            "different runs"
        )
    if lineage > head.lineage:
        base = seen.rollback.base_batch if seen.rollback else 0
        return Plan(lineage=lineage, start=start, publish="Resumed", retrain_to=max(batch, base))
    if batch > head.batch:
        return Plan(lineage=lineage, start=start, publish="Step", retrain_to=batch)
    announce: Announcement | None = None
    if head.version > 0 and head.version not in seen.announced:
        rolled = seen.rollback is not None and head.batch == seen.rollback.base_batch
        announce = "Resumed" if rolled else "Step"
    return Plan(lineage=lineage, start=start, retrain_to=head.batch, announce=announce)


def ancestry(seen: StepsSeen, checkpoints: Iterable[Point]) -> list[Point]:
    """The checkpoints on the way to the lineage in force: its own, and those before each state that it goes back to.

    The newest is where to resume; should it be lost, an older one leads to the same weights by more batches.
    """
    bases = {back.lineage: (back.base_lineage, back.base_batch) for back in seen.rollbacks}
    last: dict[int, int | None] = {}
    lineage, limit = seen.lineage, None
    while lineage not in last:
        last[lineage] = limit
        if lineage not in bases:
            break
        lineage, base = bases[lineage]
        limit = base if limit is None else min(limit, base)
    return [
        point
        for point in checkpoints
        if point.lineage in last and ((most := last[point.lineage]) is None or point.batch <= most)
    ]


def check_version(head: Point | None, version: int, *, alone: bool) -> None:
    """Refuse to go back to a version that was never there: it is a slip, and would start a lineage all the same.

    alone: no other policy is trained; else the version may be one of the others', which this one has not come to.
    Raises ConfigurationError.
    """
    if head is None:
        raise ConfigurationError(
            f"--resume-from {version}: nothing is published yet, so there is no way back; leave it out"
        )
    if alone and version > head.version:
        raise ConfigurationError(f"--resume-from {version}: there is no such version, the newest is {head.version}")


def rollback_base(seen: StepsSeen, checkpoints: Sequence[Point], version: int) -> Point:
    """The checkpoint that ``--resume-from version`` goes back to: the newest of the lineage's chain at or before it.

    Version 0 means the initial weights. Raises ConfigurationError when the run has stopped or nothing fits.
    """
    if seen.stopped:
        raise ConfigurationError("--resume-from is refused: this policy has stopped (its Stop stands in steps)")
    if version == 0:
        return Point(lineage=0, batch=0, version=0)
    chain = ancestry(seen, checkpoints)
    fitting = [point for point in chain if point.version <= version]
    if not fitting:
        kept = ", ".join(str(point.version) for point in sorted(chain)) or "none"
        raise ConfigurationError(
            f"--resume-from {version}: no checkpoint at or before that version is kept; checkpoints are of versions "
            f"{kept} (trainer.keep_checkpoints), and 0 are the initial weights"
        )
    return max(fitting)
