"""``headrace topics``: list, describe, cat, delete; the topics of a run as people read them."""

import heapq
import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json, print_table
from headrace.pipeline.cli.reading import ClusterOption, FolderOption, RunOption, abbreviated, reading, record_lines
from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.connectors.kafka import Connection, RawRecord

__all__ = ("app",)

app = command_group("Look into the topics of a run.")


@app.command("list")
def list_topics(
    folder: FolderOption = "", run: RunOption = "", bootstrap: ClusterOption = "", output: Output = Format.text
) -> None:
    """Topics of a run with partitions, records (markers of transactions count as offsets) and what they carry."""
    from headrace.schemas.topics import spec_of

    with reading(folder, run, bootstrap) as connection:
        rows = []
        for name, partitions in sorted(connection.list_run_topics().items()):
            first, end = connection.start_offsets(name), connection.end_offsets(name)
            carries = "changelog" if name.endswith("-changelog") else " ".join(spec_of(name).records) or "bytes"
            rows.append((name, partitions, sum(end.values()) - sum(first.values()), carries))
    if output is Format.json:
        print_json([dict(zip(("topic", "partitions", "offsets", "carries"), row, strict=True)) for row in rows])
    else:
        print_table(("topic", "partitions", "offsets", "carries"), rows)


@app.command()
def describe(
    topic: Annotated[str, typer.Argument(help="Name without the run's prefix, such as ledger.")],
    folder: FolderOption = "",
    run: RunOption = "",
    bootstrap: ClusterOption = "",
    output: Output = Format.text,
) -> None:
    """One topic: its row of the map, settings, and the offsets of its partitions."""
    from headrace.schemas.topics import settings_of, spec_of

    with reading(folder, run, bootstrap) as connection:
        first, end = connection.start_offsets(topic), connection.end_offsets(topic)
    changelog = topic.endswith("-changelog")
    about = {
        "topic": topic,
        "records": [] if changelog else list(spec_of(topic).records),
        "writers": [] if changelog else list(spec_of(topic).writers),
        "readers": [] if changelog else list(spec_of(topic).readers),
        "settings": settings_of(topic),
        "partitions": [{"partition": p, "first": first[p], "end": end[p]} for p in sorted(end)],
    }
    if output is Format.json:
        print_json(about)
        return
    for name in ("topic", "records", "writers", "readers", "settings"):
        value = about[name]
        shown = ", ".join(value) if isinstance(value, list) else value
        shown = " ".join(f"{k}={v}" for k, v in shown.items()) if isinstance(shown, dict) else shown
        sys.stdout.write(f"{name:9} {shown}\n")
    print_table(("partition", "first", "end"), [(p, first[p], end[p]) for p in sorted(end)])


@app.command()
def cat(
    topic: Annotated[str, typer.Argument(help="Name without the run's prefix, such as trajectories.")],
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="Records to print; 0: all.")] = 10,
    offset: Annotated[
        int, typer.Option("-o", "--offset", help="First offset of each partition; below 0 counts from the end.")
    ] = 0,
    partition: Annotated[int, typer.Option("-p", "--partition", help="Only this partition; -1: all.")] = -1,
    full: Annotated[bool, typer.Option("--full", help="Print arrays and texts whole.")] = False,
    folder: FolderOption = "",
    run: RunOption = "",
    bootstrap: ClusterOption = "",
    output: Output = Format.text,
) -> None:
    """Print records decoded, oldest first. With --format json: one object a line."""
    with reading(folder, run, bootstrap) as connection:
        records = _records(connection, topic, offset, partition)
        for raw in islice(records, count or None):
            if output is Format.json:
                sys.stdout.write(json.dumps(_as_object(raw, full)) + "\n")
            else:
                sys.stdout.write("\n".join(record_lines(raw, full=full)) + "\n")


@app.command()
def delete(
    run: Annotated[str, typer.Option("--run", help="Id of the run whose topics and groups are deleted.")],
    bootstrap: Annotated[str, typer.Option("--bootstrap", help="HOST:PORT of its Kafka.")],
) -> None:
    """Delete every topic and consumer group of a run on a cluster. There is no way back."""
    from headrace.connectors.kafka import Connection
    from headrace.schemas.config import KafkaConfig

    gone = Connection.of(KafkaConfig(), run, bootstrap).delete_run_topics()
    sys.stdout.write(f"deleted {len(gone)} topics of {run}\n")


def _records(connection: "Connection", topic: str, offset: int, partition: int) -> Iterator["RawRecord"]:
    """Records in the order of their times; each partition is read on its own, so that none hides another's."""
    end = connection.end_offsets(topic)
    wanted = [p for p in sorted(end) if partition in (-1, p)]
    if not wanted:
        raise ConfigurationError(f"{topic} has the partitions 0 to {len(end) - 1}, not {partition}")
    starts = {p: max(0, end[p] + offset) if offset < 0 else offset for p in wanted}
    streams = [connection.read_topic(topic, {p: starts[p]}) for p in wanted if starts[p] < end[p]]
    return heapq.merge(*streams, key=lambda raw: raw.timestamp_ms)


def _as_object(raw: "RawRecord", full: bool) -> dict[str, object]:
    from headrace.schemas.codec import to_plain
    from headrace.schemas.errors import UndecodableRecord

    text = {name: (value or b"").decode("utf-8", "backslashreplace") for name, value in raw.headers}
    out: dict[str, object] = {
        "topic": raw.topic, "partition": raw.partition, "offset": raw.offset, "timestamp_ms": raw.timestamp_ms,
        "key": (raw.key or b"").decode("utf-8", "backslashreplace"), "headers": text,
    }  # fmt: skip
    try:
        record = raw.decoded()
    except UndecodableRecord as error:
        return {**out, "error": str(error)}
    return {**out, "record": type(record).__name__, "value": abbreviated(to_plain(record), full)}
