"""A run's records for reading after the fact: small topics whole, of trajectories only what stands before the arrays.

In: a connection to the run's topics; out: lists of records with their places, for the report and ``verify``.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import fastavro

from headrace.connectors.kafka import Connection, RawRecord
from headrace.schemas.avsc import packaged_schema
from headrace.schemas.codec import fingerprint
from headrace.schemas.errors import HeadraceError, UndecodableRecord
from headrace.schemas.records import Record, RunEnd, RunManifest, Trajectory

__all__ = ("TrajectoryHead", "created_run", "head_of", "read_records", "read_trajectory_heads")

_FRAMING_BYTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryHead:
    """A trajectory without its arrays: what the report needs of tens of thousands."""

    group: int
    replica: int
    attempt: int
    worker: str
    status: str
    end_reason: str
    reward: float
    tokens: int
    started_ms: int
    finished_ms: int
    error: str
    prompt_text: str
    completion_text: str
    metrics: dict[str, float] = field(default_factory=dict)


def created_run(connection: Connection) -> tuple[RunManifest, bool]:
    """What a run was created with, and whether its end mark is there.

    Raises HeadraceError for a run that was never created, MissingTopic for none at all.
    """
    found = [raw.decoded_if_ours() for raw in connection.read_topic("run")]
    manifest = next((record for record in found if isinstance(record, RunManifest)), None)
    if manifest is None:
        raise HeadraceError(f"{connection.topic('run')} holds no manifest: the run has not been created")
    return manifest, any(isinstance(record, RunEnd) for record in found)


def read_records(connection: Connection, topic: str) -> Iterator[tuple[RawRecord, Record]]:
    """The committed records of a topic with their places; what is none of ours is left out (stages report it)."""
    for raw in connection.read_topic(topic):
        try:
            yield raw, raw.decoded()
        except UndecodableRecord:
            continue


def read_trajectory_heads(connection: Connection) -> Iterator[TrajectoryHead]:
    """The heads of all trajectories of a run."""
    for raw in connection.read_topic("trajectories"):
        head = head_of(raw)
        if head is not None:
            yield head


def head_of(raw: RawRecord) -> TrajectoryHead | None:
    """The head of a trajectory; None for another record, and for one that is not what its headers say."""
    written = dict(raw.headers)
    if written.get("hr-record") != b"Trajectory":
        return None
    names = [f.name for f in fields(TrajectoryHead)]
    if raw.value is not None and written.get("hr-schema") == fingerprint("Trajectory").encode():
        try:
            data: Any = fastavro.schemaless_reader(io.BytesIO(raw.value[_FRAMING_BYTES:]), _head_schema(), None)
        except (EOFError, ValueError, TypeError, IndexError, OverflowError):
            return None  # assemble has named it in a dead letter
    else:
        try:
            record = raw.decoded()
        except UndecodableRecord:
            return None
        assert isinstance(record, Trajectory)
        data = {name: getattr(record, name) for name in names}
    return TrajectoryHead(**{name: data[name] for name in names})


@cache
def _head_schema() -> Any:
    """The schema of a Trajectory up to its metrics: Avro has no field lengths, so a prefix can be read alone."""
    schema = packaged_schema("Trajectory")
    names = [entry["name"] for entry in schema["fields"]]
    cut = names.index("metrics") + 1
    return fastavro.parse_schema({**schema, "name": "TrajectoryHead", "fields": schema["fields"][:cut]})
