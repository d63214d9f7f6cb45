"""Runs ``assemble`` again over what a run recorded, with other operators or settings, and compares the decisions.

In: a connection to a run (only read from) and a configuration; out: what was decided about each group then and now.
State is built from the run's start by the stage itself, on the clock of the recorded records; nothing is written.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.connectors.kafka import Connection, RawRecord
from headrace.pipeline.flow import STAGES
from headrace.pipeline.run_records import read_records
from headrace.pipeline.runtime.driver import Entry, Place, TopologyDriver
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.records import Closed, Kept, Record

__all__ = ("Comparison", "Difference", "Replay")

STAGE = "assemble"
_UNDECIDED = "no decision"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A group that is decided otherwise: the places of what was recorded, and both decisions in words."""

    group: int
    policy: int
    place: str
    recorded: str
    replayed: str


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Groups compared, how often each pair (recorded, replayed) of verdicts came, and the groups that differ."""

    groups: int = 0
    records: int = 0
    undecodable: int = 0
    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)


class Replay:
    """One pass over the trajectories and admissions of a run.

    first, last: offsets of ``trajectories`` (in each partition, last excluded, -1 for the end); decisions that fall
    outside are made, because state follows from them, and not compared.
    """

    def __init__(self, connection: Connection, config: RunConfig, *, first: int = 0, last: int = -1) -> None:
        self._connection = connection
        self._first, self._last = first, last
        self._driver = TopologyDriver(config, {STAGE: STAGES[STAGE]}, start_ms=0)
        self._driver.listeners.append(self._written)
        self._at: dict[int, int] = {}
        self._deciding = 0
        self._made: dict[tuple[int, int], str] = {}
        self._inside: set[tuple[int, int]] = set()

    def run(self) -> Comparison:
        """Read, decide and compare. Raises ConfigurationError for operators that cannot work."""
        out = Comparison()
        for raw in self._inputs():
            try:
                record = raw.decoded()
            except UndecodableRecord:
                out.undecodable += 1
                continue
            out.records += 1
            self._feed(raw, record)
        self._fire_due(self._driver.now_ms + 1)
        recorded = self._recorded()
        everything = self._first == 0 and self._last < 0
        for key in sorted(self._inside | (recorded.keys() if everything else set())):
            place, then = recorded.get(key, ("", _UNDECIDED))
            now = self._made.get(key, _UNDECIDED)
            out.groups += 1
            out.verdicts[_verdict(then), _verdict(now)] += 1
            if then != now:
                group, policy = key
                out.differences.append(Difference(group=group, policy=policy, place=place, recorded=then, replayed=now))
        return out

    def _inputs(self) -> Iterator[RawRecord]:
        """Admissions and trajectories in the order of their times."""
        streams = []
        for topic in ("admissions", "trajectories"):
            starts = self._connection.start_offsets(topic)
            streams += [self._connection.read_topic(topic, {p: at}) for p, at in starts.items()]
        return heapq.merge(*streams, key=lambda raw: raw.timestamp_ms)

    def _feed(self, raw: RawRecord, record: Record) -> None:
        driver, place = self._driver, (raw.topic, raw.partition)
        self._fire_due(raw.timestamp_ms)
        driver.now_ms = max(driver.now_ms, raw.timestamp_ms)
        if raw.topic == "trajectories":
            self._at[raw.partition] = raw.offset
        self._deciding = raw.partition
        driver.log[place].append(Entry(raw.timestamp_ms, record, raw.key))
        driver.turn(STAGE, raw.partition)
        driver.forget(place)

    def _fire_due(self, now_ms: int) -> None:
        """Let timers fire that were due before the next record, each at its own time."""
        while (due := self._driver.next_due_ms(STAGE)) is not None and due[0] < now_ms:
            at, self._deciding = due
            self._driver.now_ms = max(self._driver.now_ms, at)
            self._driver.turn(STAGE, self._deciding)

    def _written(self, place: Place) -> None:
        record = self._driver.log[place][-1].record
        decision = _decision(record)
        if decision is not None:
            key, text = decision
            self._made[key] = text
            at = self._at.get(self._deciding, 0)
            if at >= self._first and (self._last < 0 or at < self._last):
                self._inside.add(key)
        self._driver.forget(place)

    def _recorded(self) -> dict[tuple[int, int], tuple[str, str]]:
        out: dict[tuple[int, int], tuple[str, str]] = {}
        for raw, record in read_records(self._connection, "ledger"):
            decision = _decision(record)
            if decision is not None:
                out.setdefault(decision[0], (str(raw.source), decision[1]))
        return out


def _decision(record: Record) -> tuple[tuple[int, int], str] | None:
    """((group, policy), words) of a record in which ``assemble`` decides about a group."""
    if isinstance(record, Kept):
        return (record.group, record.policy), f"kept, mean reward {record.reward_mean:.4g}"
    if isinstance(record, Closed) and record.by == STAGE:
        by = f" by {record.operator}" if record.operator else ""
        return (record.group, record.policy), f"{record.reason}{by}: {record.detail}".rstrip(": ")
    return None


def _verdict(text: str) -> str:
    return text.split(":")[0].split(",")[0]
