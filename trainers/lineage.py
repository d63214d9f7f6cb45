"""Where a trainer goes on: a decision over the store's head, the ``steps`` topic and the checkpoints (protocol 8).

Pure. The checkpoint alone decides where training resumes; (lineage, batch) are compared, never version numbers. What is
published stays published, and a batch that has a Step is retrained without publishing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Record, Resumed, Rollback, Step, Stop

__all__ = ("Announcement", "Plan", "Point", "StepsSeen", "decide", "rollback_base", "seen_in")

Announcement = Literal["Step", "Resumed"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Point:
    """A state of the weights: the batch that made it, within a lineage; ``version`` as it was or will be published."""

    lineage: int
    batch: int
    version: int = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsSeen:
    """What the ``steps`` topic says of a policy: stopped, the last Rollback, versions with a Step or Resumed."""

    stopped: bool = False
    rollback: Rollback | None = None
    announced: frozenset[int] = frozenset()

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
    stopped, rollback, announced = False, None, set()
    for record in records:
        if isinstance(record, Stop):
            stopped = True
        elif isinstance(record, Rollback):
            rollback = record
        elif isinstance(record, Step | Resumed):
            announced.add(record.version)
    return StepsSeen(stopped=stopped, rollback=rollback, announced=frozenset(announced))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do at a start, in this order.

    stopped: nothing, exit. first: publish the initial weights as version 0. start: the checkpoint to load, None for the
    initial weights. publish: publish the loaded weights at head + 1 with this announcement. retrain_to: train the
    batches after ``start_batch`` up to this one without publishing. announce: the head lacks its record, write it.
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
    start = _restart_point(seen, checkpoints)
    batch = start.batch if start else 0
    if (lineage, batch) > (head.lineage, head.batch):
        kind: Announcement = "Resumed" if lineage > head.lineage else "Step"
        return Plan(lineage=lineage, start=start, publish=kind, retrain_to=batch)
    if head.lineage > lineage:
        raise ConfigurationError(
            f"the store's head has lineage {head.lineage}, the steps topic knows {lineage}: store and topics are of "
            "different runs"
        )
    announce: Announcement | None = None
    if head.version > 0 and head.version not in seen.announced:
        rolled = seen.rollback is not None and head.batch == seen.rollback.base_batch
        announce = "Resumed" if rolled else "Step"
    return Plan(lineage=lineage, start=start, retrain_to=head.batch, announce=announce)


def _restart_point(seen: StepsSeen, checkpoints: Sequence[Point]) -> Point | None:
    """The newest checkpoint of the lineage in force, else the one that it starts from; None: the initial weights."""
    mine = [point for point in checkpoints if point.lineage == seen.lineage]
    if mine:
        return max(mine)
    if seen.rollback is None or seen.rollback.base_batch == 0:
        return None
    base = Point(lineage=seen.rollback.base_lineage, batch=seen.rollback.base_batch, version=seen.rollback.base_version)
    for point in checkpoints:
        if point == base:
            return point
    raise ConfigurationError(
        f"lineage {seen.lineage} starts from the checkpoint of batch {base.batch} in lineage {base.lineage}, which is "
        "not in the checkpoint folder; put it back"
    )


def rollback_base(seen: StepsSeen, checkpoints: Sequence[Point], version: int) -> Point:
    """The checkpoint that ``--resume-from version`` goes back to: the newest of the lineage's chain at or before it.

    Version 0 means the initial weights. Raises ConfigurationError when the run has stopped or nothing fits.
    """
    if seen.stopped:
        raise ConfigurationError("--resume-from is refused: this policy has stopped (its Stop stands in steps)")
    if version == 0:
        return Point(lineage=0, batch=0, version=0)
    chain = [point for point in checkpoints if point.lineage == seen.lineage]
    chain += [point for point in checkpoints if point == seen.base]
    fitting = [point for point in chain if point.version <= version]
    if not fitting:
        kept = ", ".join(str(point.version) for point in sorted(chain)) or "none"
        raise ConfigurationError(
            f"--resume-from {version}: no checkpoint at or before that version is kept; checkpoints are of versions "
            f"{kept} (trainer.keep_checkpoints), and 0 are the initial weights"
        )
    return max(fitting)
