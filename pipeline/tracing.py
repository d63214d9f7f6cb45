"""The life of one prompt, put together by places and times instead of by reading a run through.

In: a connection and a prompt id; out: events in the order of time, each with the place of the record that says so.
Small topics are searched for the prompt's id; from there on only the seconds of its groups are read. Clocks of the
machines that wrote the records may differ by ``SKEW_MS``; where something is missing, wider stretches are read.
"""

from dataclasses import asdict, dataclass, field

from confluent_kafka import Message

from headrace.connectors.kafka import Connection, RawRecord, headers_in
from headrace.pipeline.trace_operators import Passed, kept_text
from headrace.pipeline.trace_weights import trained
from headrace.pipeline.windows import Windows
from headrace.schemas.ids import group_partition
from headrace.schemas.records import (
    Admission,
    Batched,
    Closed,
    Failed,
    Kept,
    Manifest,
    NeedsScore,
    Opened,
    Prompt,
    Record,
    Skipped,
    Task,
    Trajectory,
)

__all__ = ("SKEW_MS", "Event", "follow")

SKEW_MS = 500
"""How far apart the clocks of writers may be before a stretch has to be read again, in milliseconds."""
_WIDER_MS = (10_000, 120_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened: when (Kafka's time of the record), where the record lies, and what in words."""

    time_ms: int
    place: str
    text: str

    def plain(self) -> dict[str, object]:
        """As JSON data."""
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class _Life:
    """What is known of one group: when its admission was written, when its last credit ended, its batches."""

    admission: Admission
    began_ms: int
    ended_ms: int = -1
    open: set[int] = field(default_factory=set)
    batches: dict[tuple[int, int], int] = field(default_factory=dict)
    """(policy, batch) to the time of its Batched."""


class _Trace:
    """Collects the events of a prompt; a record that is met twice is told once."""

    def __init__(self, connection: Connection, windows: Windows, prompt_id: str) -> None:
        self._connection = connection
        self._windows = windows
        self._mark = prompt_id.encode()
        self._prompt_id = prompt_id
        self.events: dict[str, Event] = {}
        self.lives: dict[int, _Life] = {}
        self._passed: Passed | None = None
        self._offers: dict[int, int] = {}
        """Offset of each of its rows in ``prompts``, until it is known what became of it, to the time of the record."""

    def add(self, raw: RawRecord, text: str) -> None:
        place = str(raw.source)
        self.events[place] = Event(time_ms=raw.timestamp_ms, place=place, text=text)

    def prompts(self) -> None:
        """Its rows, one an epoch."""
        for raw in self._connection.read_topic("prompts", wanted=self._named):
            record = raw.decoded_if_ours()
            if isinstance(record, Prompt) and record.prompt_id == self._prompt_id:
                text = record.prompt or " | ".join(f"{m.role}: {m.content}" for m in record.messages)
                row = f"prompt of {record.dataset} row {record.row}, epoch {record.epoch}"
                self.add(raw, f"{row}: {text[:120]!r}")
                self._offers[raw.offset] = raw.timestamp_ms

    def admissions(self) -> None:
        """Its groups, and replicas of them that failed."""
        failed = []
        for raw in self._connection.read_topic("admissions", wanted=lambda m: self._named(m) or _failed(m)):
            if ("hr-record", b"Failed") in raw.headers:
                failed.append(raw)
                continue
            record = raw.decoded_if_ours()
            if isinstance(record, Admission) and record.prompt_id == self._prompt_id:
                policies = {policy.policy for policy in record.policies}
                self.lives[record.group] = _Life(admission=record, began_ms=raw.timestamp_ms, open=policies)
                retry = ", a retry" if record.retry else ""
                self.add(raw, f"admitted as group {record.group}: {record.group_size} replicas{retry}")
                self._settle(record)
        for raw in failed:
            record = raw.decoded_if_ours()
            if isinstance(record, Failed) and record.group in self.lives:
                self.add(raw, f"group {record.group} replica {record.replica} failed: {record.reason}")

    def _settle(self, record: Admission | Skipped) -> None:
        for source in record.sources:
            self._offers.pop(source.offset, None)

    def skips(self) -> None:
        """Rows that an operator before rollout has skipped; the ledger is read only while one is unaccounted for."""
        if not self._offers:
            return
        start = self._windows.since("ledger", min(self._offers.values()) - SKEW_MS)
        for raw in self._windows.read("ledger", start):
            if ("hr-record", b"Skipped") not in raw.headers:
                continue
            record = self._ours(raw)
            if isinstance(record, Skipped) and record.prompt_id == self._prompt_id:
                told = f"{record.reason}: {record.detail}".rstrip(": ")
                self.add(raw, f"skipped in epoch {record.epoch} by {record.operator}: {told}")
                self._settle(record)
            if not self._offers:
                return

    def ledger(self) -> None:
        """What became of the credits of its groups; reads on from each admission until all of them have ended."""
        if self.lives:
            self._passed = Passed(self._connection)
        for life in self.lives.values():
            start = self._windows.since("ledger", life.began_ms - SKEW_MS) if life.open else {}
            for raw in self._windows.read("ledger", start):
                record = raw.decoded_if_ours()
                if record is not None:
                    self._credit(raw, record)
                if not life.open:
                    break

    def _credit(self, raw: RawRecord, record: Record) -> None:
        text = _ledger_text(record, self.lives)
        if isinstance(record, Kept) and text and self._passed is not None:
            text = kept_text(record, self._passed.names(self.lives[record.group].admission.stream, record.policy))
        if not text:
            return
        self.add(raw, text)
        ended = record.groups if isinstance(record, Batched) else []
        if isinstance(record, Closed):
            ended = [record.group]
        for group in self.lives.keys() & set(ended):
            life = self.lives[group]
            life.open.discard(getattr(record, "policy", -1))
            life.ended_ms = max(life.ended_ms, raw.timestamp_ms)
            if isinstance(record, Batched):
                life.batches[record.policy, record.batch] = raw.timestamp_ms

    def rollouts(self) -> None:
        """Tasks and trajectories of its groups."""
        for life in self.lives.values():
            for topic in ("tasks", "trajectories"):
                for skew_ms in (SKEW_MS, *_WIDER_MS):
                    if self._between(topic, life, skew_ms) >= life.admission.group_size:
                        break

    def _between(self, topic: str, life: _Life, skew_ms: int) -> int:
        """Add a group's records of a topic from its stretch of time; returns how many there are."""
        group = life.admission.group
        start = self._windows.since(topic, life.began_ms - skew_ms)
        until = self._windows.since(topic, life.ended_ms + skew_ms) if life.ended_ms >= 0 else None
        if topic == "trajectories":
            partition = group_partition(group, len(start))
            start = {partition: start[partition]}
        found = 0
        for raw in self._windows.read(topic, start, until):
            record = self._ours(raw)
            text = _rollout_text(record) if getattr(record, "group", -1) == group else ""
            if text:
                found += 1
                self.add(raw, text)
        return found

    def training(self) -> None:
        """Batches that hold its groups, the steps that trained them, and who loaded the weights."""
        batches: dict[tuple[int, int], set[int]] = {}
        for group, life in self.lives.items():
            for (policy, batch), at in life.batches.items():
                batches.setdefault((policy, batch), set()).add(group)
                self._manifest(policy, batch, at, batches[policy, batch])
        for raw, text in trained(self._connection, self._windows, set(batches)):
            self.add(raw, text)

    def _manifest(self, policy: int, batch: int, at_ms: int, groups: set[int]) -> None:
        start = self._windows.since("manifests", at_ms - SKEW_MS)
        for raw in self._windows.read("manifests", {policy: start[policy]}):
            if raw.key is not None and raw.key != str(batch).encode():
                continue
            record = raw.decoded_if_ours()
            if isinstance(record, Manifest) and record.batch == batch:
                members = [m for m in record.members if m.group in groups]
                if members:
                    age = record.start_version - min(m.oldest_version for m in members)
                    self.add(raw, f"batch {batch} holds {len(members)} of its members, staleness up to {age}")
                return

    def _named(self, message: Message) -> bool:
        return self._mark in (message.value() or b"")

    def _ours(self, raw: RawRecord) -> Record | None:
        """The record when the prompt's id stands anywhere in it: looking is far cheaper than decoding."""
        return raw.decoded_if_ours() if raw.value is not None and self._mark in raw.value else None


def _failed(message: Message) -> bool:
    return ("hr-record", b"Failed") in headers_in(message)


def follow(connection: Connection, prompt_id: str) -> list[Event]:
    """Everything that happened to a prompt; empty when the run has none of this id."""
    with Windows(connection) as windows:
        trace = _Trace(connection, windows, prompt_id)
        trace.prompts()
        trace.admissions()
        trace.skips()
        trace.ledger()
        trace.rollouts()
        trace.training()
    return sorted(trace.events.values(), key=lambda event: event.time_ms)


def _rollout_text(record: Record | None) -> str:
    if isinstance(record, Task) and record.kind == "train":
        return f"task for group {record.group} replica {record.replica} attempt {record.attempt} to {record.worker}"
    if isinstance(record, Trajectory):
        versions = ", ".join(f"{name} v{version}" for name, version in record.oldest_versions.items())
        result = f"{record.completion_text[:80]!r} reward {record.reward:g}" if not record.error else record.error
        return (
            f"group {record.group} replica {record.replica} by {record.worker} ({versions or 'no version'}): "
            f"{record.end_reason}, {record.tokens} tokens: {result}"
        )
    return ""


def _ledger_text(record: Record, groups: "dict[int, _Life]") -> str:
    match record:
        case Opened(group=group) if group in groups:
            return f"group {group}: a credit of policy {record.policy} opens, min version {record.min_version}"
        case Kept(group=group) if group in groups:
            return kept_text(record, [])
        case NeedsScore(group=group) if group in groups:
            return f"group {group} waits for the score of its {len(record.members)} members"
        case Closed(group=group) if group in groups:
            by = f"{record.by} {record.operator}".strip()
            return f"group {group} closed as {record.reason} by {by}: {record.detail}".rstrip(": ")
        case Batched(groups=inside) if groups.keys() & set(inside):
            return f"group {min(groups.keys() & set(inside))} goes into batch {record.batch} of policy {record.policy}"
        case _:
            return ""
