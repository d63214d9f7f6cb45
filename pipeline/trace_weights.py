"""What training made of some batches: the steps that trained them, and the workers that took the weights up.

In: a connection and (policy, batch) pairs; out: records with the words for them.
"""

from collections.abc import Collection, Iterator

from headrace.connectors.kafka import Connection, RawRecord
from headrace.pipeline.run_records import read_records
from headrace.pipeline.windows import Windows
from headrace.schemas.records import Demand, Resumed, Step

__all__ = ("trained",)

_WATCHED_MS = 30_000
"""Workers that have not taken a version up after this are not waited for, in milliseconds."""
_ALL_HEARD_MS = 3_000
"""In this time every live worker has announced itself, in milliseconds."""


def trained(
    connection: Connection, windows: Windows, batches: Collection[tuple[int, int]]
) -> Iterator[tuple[RawRecord, str]]:
    """Steps of the batches, resumes of their policies, and each worker's first word of serving those versions."""
    policies = {policy for policy, _ in batches}
    for raw, record in read_records(connection, "steps") if batches else ():
        if isinstance(record, Step) and (record.policy, record.batch) in batches:
            yield (
                raw,
                (
                    f"batch {record.batch} trained: version {record.version}, loss {record.loss:.4f}, "
                    f"weights published as {record.delta_bytes} bytes"
                ),
            )
            yield from _first_to_serve(windows, record, raw.timestamp_ms)
        elif isinstance(record, Resumed) and record.policy in policies:
            yield raw, f"lineage {record.lineage} resumes from batch {record.batch} as version {record.version}"


def _first_to_serve(windows: Windows, step: Step, at_ms: int) -> Iterator[tuple[RawRecord, str]]:
    """Of every worker the first Demand with the step's version or a later one, as long as some worker has an older."""
    seen: set[str] = set()
    behind: set[str] = set()
    for raw in windows.read("demand", windows.since("demand", at_ms), windows.since("demand", at_ms + _WATCHED_MS)):
        if raw.timestamp_ms > at_ms + _ALL_HEARD_MS and not behind:
            return
        record = raw.decoded_if_ours()
        if not isinstance(record, Demand) or record.worker in seen:
            continue
        version = next((hosted.version for hosted in record.policies if hosted.policy == step.policy), -1)
        if version >= step.version:
            seen.add(record.worker)
            behind.discard(record.worker)
            yield raw, f"{record.worker} samples policy {step.policy} with version {version}"
        else:
            behind.add(record.worker)
