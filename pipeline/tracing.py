"""The life of one prompt, put together from small topics; trajectories are fetched by place only.

In: a connection and a prompt id; out: events in the order of time, each with the place of the record that says so.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from headrace.connectors.kafka import Connection, RawRecord
from headrace.pipeline.run_records import read_records
from headrace.schemas.ids import group_partition
from headrace.schemas.records import (
    Admission,
    Batched,
    Closed,
    Failed,
    Kept,
    Manifest,
    Opened,
    Prompt,
    Record,
    Resumed,
    Step,
    Task,
    Trajectory,
)

__all__ = ("Event", "follow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened: when (Kafka's time of the record), where the record lies, and what in words."""

    time_ms: int
    place: str
    text: str

    def plain(self) -> dict[str, object]:
        """As JSON data."""
        return asdict(self)


def follow(connection: Connection, prompt_id: str) -> list[Event]:
    """Everything that happened to a prompt; empty when the run has none of this id."""
    events = [_event(raw, text) for raw, text in _prompts(connection, prompt_id)]
    groups: set[int] = set()
    for raw, record in read_records(connection, "admissions"):
        if isinstance(record, Admission) and record.prompt_id == prompt_id:
            groups.add(record.group)
            retry = ", a retry" if record.retry else ""
            events.append(_event(raw, f"admitted as group {record.group}: {record.group_size} replicas{retry}"))
        elif isinstance(record, Failed) and record.group in groups:
            events.append(_event(raw, f"group {record.group} replica {record.replica} failed: {record.reason}"))
    for raw, record in read_records(connection, "tasks"):
        if isinstance(record, Task) and record.kind == "train" and record.group in groups:
            what = f"group {record.group} replica {record.replica} attempt {record.attempt}"
            events.append(_event(raw, f"task for {what} to {record.worker}"))
    events += _trajectories(connection, groups)
    batches = _ledger(connection, groups, events)
    events += _training(connection, batches)
    return sorted(events, key=lambda event: event.time_ms)


def _prompts(connection: Connection, prompt_id: str) -> Iterator[tuple[RawRecord, str]]:
    for raw, record in read_records(connection, "prompts"):
        if isinstance(record, Prompt) and record.prompt_id == prompt_id:
            text = record.prompt or " | ".join(f"{m.role}: {m.content}" for m in record.messages)
            yield raw, f"prompt of {record.dataset} row {record.row}, epoch {record.epoch}: {text[:120]!r}"


def _trajectories(connection: Connection, groups: set[int]) -> Iterator[Event]:
    count = connection.partition_count("trajectories")
    partitions = {group_partition(group, count) for group in groups}
    starts = {p: at for p, at in connection.start_offsets("trajectories").items() if p in partitions}
    for raw in connection.read_topic("trajectories", starts) if starts else ():
        if raw.key is not None and raw.key.split(b"/")[0].isdigit() and int(raw.key.split(b"/")[0]) not in groups:
            continue
        record = raw.decoded_if_ours()
        if isinstance(record, Trajectory) and record.group in groups:
            versions = ", ".join(f"{name} v{version}" for name, version in record.oldest_versions.items())
            result = f"{record.completion_text[:80]!r} reward {record.reward:g}" if not record.error else record.error
            yield _event(
                raw,
                f"group {record.group} replica {record.replica} by {record.worker} ({versions or 'no version'}): "
                f"{record.end_reason}, {record.tokens} tokens: {result}",
            )


def _ledger(connection: Connection, groups: set[int], events: list[Event]) -> dict[tuple[int, int], set[int]]:
    """Add what the ledger says; returns (policy, batch) to the groups in it."""
    batches: dict[tuple[int, int], set[int]] = {}
    for raw, record in read_records(connection, "ledger"):
        text = _ledger_text(record, groups)
        if text:
            events.append(_event(raw, text))
        if isinstance(record, Batched) and groups.intersection(record.groups):
            batches[record.policy, record.batch] = groups.intersection(record.groups)
    return batches


def _ledger_text(record: Record, groups: set[int]) -> str:
    match record:
        case Opened(group=group) if group in groups:
            return f"group {group}: a credit of policy {record.policy} opens, min version {record.min_version}"
        case Kept(group=group) if group in groups:
            return f"group {group} kept: mean reward {record.raw_mean:.3f}"
        case Closed(group=group) if group in groups:
            by = f"{record.by} {record.operator}".strip()
            return f"group {group} closed as {record.reason} by {by}: {record.detail}".rstrip(": ")
        case Batched(groups=inside) if groups.intersection(inside):
            return f"group {min(groups.intersection(inside))} goes into batch {record.batch} of policy {record.policy}"
        case _:
            return ""


def _training(connection: Connection, batches: dict[tuple[int, int], set[int]]) -> Iterator[Event]:
    for raw, record in read_records(connection, "manifests"):
        if isinstance(record, Manifest):
            inside = batches.get((record.policy, record.batch))
            members = [m for m in record.members if inside and m.group in inside]
            if members:
                age = record.start_version - min(m.oldest_version for m in members)
                yield _event(raw, f"batch {record.batch} holds {len(members)} of its members, staleness up to {age}")
    for raw, record in read_records(connection, "steps"):
        if isinstance(record, Step) and (record.policy, record.batch) in batches:
            yield _event(raw, f"batch {record.batch} trained: version {record.version}, loss {record.loss:.4f}")
        elif isinstance(record, Resumed) and batches:
            yield _event(raw, f"lineage {record.lineage} resumes from batch {record.batch} as version {record.version}")


def _event(raw: RawRecord, text: str) -> Event:
    return Event(time_ms=raw.timestamp_ms, place=str(raw.source), text=text)
