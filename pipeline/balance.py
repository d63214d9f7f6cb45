"""Balance of rollouts and training: how long trainers wait, what each worker makes, how many workers there should be.

In: records of ``steps``, ``ledger``, ``demand`` and the heads of trajectories, with Kafka's times; out: a report over
the last versions. The rule is AstraFlow's in three zones (arXiv 2605.15565, 4.2.1; docs/balance.md). Two things are
ours. Every policy's trainer has a wait share of its own, so two trainers that take turns are no false alarm. And
admission holds a pool back that is too large, so what entered says nothing of what it could make: entered groups are
counted where they leave (trained, or too old) and divided by the share of the time in which workers were busy.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from headrace.pipeline.run_records import TrajectoryHead
from headrace.pipeline.workers import is_suspended
from headrace.schemas.records import Batched, Closed, Demand, Kept, Record, Resumed, Step, Stop

__all__ = (
    "HIGH_WAIT",
    "LOW_WAIT",
    "MARGIN",
    "Balance",
    "BalanceReport",
    "Decision",
    "PolicyRow",
    "WorkerRow",
    "Zones",
    "decide",
    "wait_share",
    "with_reserve",
)

Branch = Literal["grow", "hold", "shrink"]

HIGH_WAIT, LOW_WAIT = 0.10, 0.05
"""Wait shares above which the pool grows, and below which it may shrink."""
MARGIN = 1.10
"""What a shrunk pool keeps beyond what was consumed."""
_MOST_WAIT = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Zones:
    """Where the zones lie: wait shares above which a pool grows and below which it may shrink, what it keeps then
    beyond what was consumed, and the share of busy slots above which it grows although nobody waits yet (1: never).
    The defaults are AstraFlow's, which has no such share; lower shares and a larger margin buy less waiting.
    """

    grow_above: float = HIGH_WAIT
    shrink_below: float = LOW_WAIT
    margin: float = MARGIN
    busy_above: float = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a pool, and its size afterwards."""

    branch: Branch
    target: int


def wait_share(wait_seconds: float, step_seconds: float) -> float:
    """Share of a trainer's time in which it waits for a batch, 0.95 at most; 0 when no time was seen.

    >>> wait_share(30, 120)
    0.25
    """
    return min(wait_seconds / step_seconds, _MOST_WAIT) if step_seconds > 0 else 0.0


def decide(size: int, wait: float, entered: float, consumed: float, zones: Zones | None = None) -> Decision:
    """The three zones: grow a pool that starves its trainer, shrink one that makes more than is used, else hold.

    size: workers or GPUs. entered, consumed: groups that the pool made (or could have made) and that were trained.

    >>> decide(6, 0.25, 2560, 2560), decide(11, 0.021, 3413, 2560)
    (Decision(branch='grow', target=8), Decision(branch='shrink', target=10))
    """
    zones = zones or Zones()
    if wait > zones.grow_above and size > 0:
        return Decision("grow", math.ceil(size / (1 - wait)))
    if wait < zones.shrink_below and entered > 0 and consumed > 0 and size > 0:
        return Decision("shrink", min(size, math.ceil(size * (consumed / entered) * zones.margin)))
    return Decision("hold", size)


def with_reserve(decision: Decision, size: int, busy: float, zones: Zones) -> Decision:
    """A pool whose slots are busy above ``zones.busy_above`` has no reserve for longer answers: it grows beforehand."""
    if decision.branch == "grow" or busy <= zones.busy_above or size == 0:
        return decision
    return Decision("grow", max(size + 1, math.ceil(size * busy * zones.margin)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One policy within the window. Seconds are means of a step; groups are counted."""

    policy: str
    steps: int
    wait_share: float
    step_seconds: float
    wait_seconds: float
    kept: int
    consumed: int
    filtered: int
    stale: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """One worker within the window. ``busy`` is the share of its slots that held a task."""

    worker: str
    status: Literal["healthy", "suspended", "silent", "gone"]
    slots: int
    busy: float
    trajectories: int
    usable: int
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceReport:
    """The window's figures and the decision; ``size`` and ``target`` are in workers.

    wait_share: of the policy that waits most. busy_share: of all slots of living workers. entered: groups that were
    trained or grew too old, divided by the busy share: what the pool would have made with every slot busy. What is in
    stock meanwhile does not count, since admission bounds it.
    """

    since_ms: int
    until_ms: int
    size: int
    branch: Branch
    target: int
    wait_share: float
    busy_share: float
    entered: float
    consumed: int
    policies: list[PolicyRow] = field(default_factory=list)
    workers: list[WorkerRow] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return (self.until_ms - self.since_ms) / 1000


class Balance:
    """Folds a run; ``report`` is over the last ``versions`` steps of every policy."""

    def __init__(
        self, policies: list[str], versions: int = 10, *, zones: Zones | None = None, silent_seconds: float = 10.0
    ) -> None:
        """A worker without Demand for ``silent_seconds`` is taken for dead: its leases are lost (protocol 5)."""
        self._silent_ms = round(1000 * silent_seconds)
        self._zones = zones or Zones()
        self._policies = policies
        self._versions = versions
        self._steps: dict[int, deque[Step]] = defaultdict(lambda: deque(maxlen=versions + 1))
        self._ledger: dict[int, deque[tuple[int, str, int]]] = defaultdict(deque)
        self._demand: dict[str, deque[Demand]] = defaultdict(deque)
        self._made: dict[str, deque[TrajectoryHead]] = defaultdict(deque)
        self._stopped: set[int] = set()
        self._newest_ms = 0
        self.steps_seen = 0

    def fold(self, record: Record | TrajectoryHead, timestamp_ms: int) -> None:
        """Take one record with Kafka's time of it; those of no interest are ignored."""
        self._newest_ms = max(self._newest_ms, timestamp_ms)
        match record:
            case Step():
                self._steps[record.policy].append(record)
                self.steps_seen += 1
            case Resumed():
                self._steps[record.policy].clear()  # the time between is a restart, no step
            case Stop():
                self._stopped.add(record.policy)
            case Kept():
                self._ledger[record.policy].append((timestamp_ms, "kept", 1))
            case Batched():
                self._ledger[record.policy].append((timestamp_ms, "consumed", len(record.groups)))
            case Closed():
                self._ledger[record.policy].append((timestamp_ms, record.reason, 1))
            case Demand():
                if record.role != "eval":  # it never works for a trainer
                    self._demand[record.worker].append(record)
            case TrajectoryHead():
                self._made[record.worker].append(record)
            case _:
                pass

    def report(self) -> BalanceReport | None:
        """The figures of the window; None before a policy has two steps."""
        running = [p for p in range(len(self._policies)) if p not in self._stopped and len(self._steps[p]) > 1]
        if not running:
            return None
        since = min(self._steps[p][0].finished_ms for p in running)
        until = max(max(self._steps[p][-1].finished_ms for p in running), self._newest_ms)
        self._forget(since)
        rows = [self._policy(p, since) for p in running]
        workers = [self._worker(name, since, until) for name in sorted(self._demand)]
        alive = [w for w in workers if w.status == "healthy"]
        slots = sum(w.slots for w in alive)
        busy = sum(w.busy * w.slots for w in alive) / slots if slots else 0.0
        wait = max(row.wait_share for row in rows)
        consumed, stale = sum(r.consumed for r in rows), sum(r.stale for r in rows)
        entered = (consumed + stale) / busy if busy else 0.0
        decision = decide(len(alive), wait, entered, consumed, self._zones)
        decision = with_reserve(decision, len(alive), busy, self._zones)
        return BalanceReport(
            since_ms=since, until_ms=until, size=len(alive), branch=decision.branch, target=decision.target,
            wait_share=wait, busy_share=busy, entered=entered, consumed=consumed, policies=rows, workers=workers,
        )  # fmt: skip

    def living(self, now_ms: int) -> int:
        """Workers that take tasks and were heard of within ``silent_seconds``, whether or not there are steps."""
        newest = [said[-1] for said in self._demand.values()]
        return sum(one.capacity > 0 and now_ms - one.sent_ms <= self._silent_ms for one in newest)

    def _policy(self, policy: int, since: int) -> PolicyRow:
        steps = list(self._steps[policy])
        whole = (steps[-1].finished_ms - steps[0].finished_ms) / 1000
        waited = sum(step.wait_seconds for step in steps[1:])
        counts: dict[str, int] = defaultdict(int)
        for at, what, groups in self._ledger[policy]:
            counts[what] += groups if at >= since else 0
        return PolicyRow(
            policy=self._policies[policy], steps=len(steps) - 1, wait_share=wait_share(waited, whole),
            step_seconds=whole / (len(steps) - 1), wait_seconds=waited / (len(steps) - 1), kept=counts["kept"],
            consumed=counts["consumed"], filtered=counts["filtered"], stale=counts["stale"],
        )  # fmt: skip

    def _worker(self, name: str, since: int, until: int) -> WorkerRow:
        said = self._demand[name]
        last, made = said[-1], self._made[name]
        status: Literal["healthy", "suspended", "silent", "gone"] = "healthy"
        if last.capacity == 0:
            status = "suspended" if is_suspended(last) else "gone"
        elif until - last.sent_ms > self._silent_ms:
            status = "silent"
        begun = max(since, said[0].sent_ms)
        seconds = max(1e-3, (until - begun) / 1000)
        tokens = sum(head.tokens for head in made)
        return WorkerRow(
            worker=name, status=status, slots=max(1, last.capacity - 1) if last.capacity else 0,
            busy=_busy(said, begun, until), trajectories=len(made), usable=sum(h.status == "train" for h in made),
            tokens=tokens, tokens_per_second=tokens / seconds,
        )  # fmt: skip

    def _forget(self, since: int) -> None:
        """Drop what is older than the window; the newest Demand before it tells what was held at its start."""
        for events in self._ledger.values():
            while events and events[0][0] < since:
                events.popleft()
        for name, said in list(self._demand.items()):
            while len(said) > 1 and said[1].sent_ms <= since:
                said.popleft()
            if said[-1].sent_ms < since - self._silent_ms:
                del self._demand[name]
        for made in self._made.values():
            while made and made[0].finished_ms < since:
                made.popleft()


def _busy(said: Iterable[Demand], since: int, until: int) -> float:
    """Share of a worker's slots (one less than the tasks it takes) that held a task, over the time."""
    before: Demand | None = None
    held = whole = 0.0
    for demand in said:
        if before is not None:
            seconds = max(0, min(demand.sent_ms, until) - max(before.sent_ms, since))
            held, whole = held + seconds * _filled(before), whole + seconds
        before = demand
    if before is not None:
        seconds = max(0, until - max(before.sent_ms, since))
        held, whole = held + seconds * _filled(before), whole + seconds
    return held / whole if whole else 0.0


def _filled(demand: Demand) -> float:
    return min(1.0, len(demand.held) / max(1, demand.capacity - 1))
