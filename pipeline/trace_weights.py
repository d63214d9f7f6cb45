"""What training made of some batches: the steps that trained them, and the workers that took the weights up.

In: a connection and (policy, batch) pairs; out: records with the words for them.
"""

from collections.abc import Collection, Iterator

from headrace.connectors.kafka import Connection, RawRecord
from headrace.pipeline.run_records import read_records
from headrace.schemas.records import Demand, Resumed, Step

__all__ = ("trained",)

_WATCHED_MS = 30_000
"""Workers that have not taken a version up after this are not waited for, in milliseconds."""


def trained(
    connection: Connection, batches: Collection[tuple[int, int]], skew_ms: int
) -> Iterator[tuple[RawRecord, str]]:
    """Steps of the batches, resumes of their policies, and the first worker's word of serving each version.

    skew_ms: how far apart the clocks of writers may be.
    """
    policies = {policy for policy, _ in batches}
    for raw, record in read_records(connection, "steps") if batches else ():
        if isinstance(record, Step) and (record.policy, record.batch) in batches:
            yield raw, (
                f"batch {record.batch} trained: version {record.version}, loss {record.loss:.4f}, "
                f"weights published as {record.delta_bytes} bytes"
            )
            yield from _first_to_serve(connection, record, raw.timestamp_ms, skew_ms)
        elif isinstance(record, Resumed) and record.policy in policies:
            yield raw, f"lineage {record.lineage} resumes from batch {record.batch} as version {record.version}"


def _first_to_serve(connection: Connection, step: Step, at_ms: int, skew_ms: int) -> Iterator[tuple[RawRecord, str]]:
    """Of every worker the first Demand with the step's version or a later one."""
    start = connection.offsets_since("demand", at_ms - skew_ms)
    until = connection.offsets_since("demand", at_ms + _WATCHED_MS)
    seen: set[str] = set()
    for raw in connection.read_topic("demand", start, until=until):
        record = raw.decoded_if_ours()
        if not isinstance(record, Demand) or record.worker in seen:
            continue
        version = next((hosted.version for hosted in record.policies if hosted.policy == step.policy), -1)
        if version >= step.version:
            seen.add(record.worker)
            yield raw, f"{record.worker} samples policy {step.policy} with version {version}"
