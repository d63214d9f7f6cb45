"""``headrace topics``: list, describe, cat, tail, create, delete; the topics of a run as people read them."""

import json
import sys
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli.arguments import (
    Format,
    Output,
    command_group,
    compositions,
    print_json,
    print_table,
)
from headrace.pipeline.cli.reading import ClusterOption, FolderOption, RunOption, reading, record_lines, topics_of
from headrace.pipeline.cli.topic_stream import as_object, coming_records, kept_records
from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.connectors.kafka import RawRecord
    from headrace.schemas.topics import TopicSpec

__all__ = ("app",)

app = command_group("Look into the topics of a run.")


@app.command("list")
def list_topics(
    folder: FolderOption = "", run: RunOption = "", bootstrap: ClusterOption = "", output: Output = Format.text
) -> None:
    """Topics of a run with partitions, records (markers of transactions count as offsets) and what they carry."""
    with reading(folder, run, bootstrap) as connection:
        rows = []
        for name, partitions in sorted(topics_of(connection).items()):
            first, end = connection.start_offsets(name), connection.end_offsets(name)
            spec = _row_of(name)
            words = "changelog" if name.endswith("-changelog") else "of somebody else"
            carries = (" ".join(spec.records) or "bytes") if spec is not None else words
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
    from headrace.schemas.topics import settings_of

    with reading(folder, run, bootstrap) as connection:
        first, end = connection.start_offsets(topic), connection.end_offsets(topic)
    spec = _row_of(topic)
    about = {
        "topic": topic,
        "records": list(spec.records) if spec is not None else [],
        "writers": list(spec.writers) if spec is not None else [],
        "readers": list(spec.readers) if spec is not None else [],
        "settings": settings_of(topic) if spec is not None or topic.endswith("-changelog") else {},
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
        for raw in islice(kept_records(connection, topic, offset, partition), count or None):
            _print_record(raw, output, full)


@app.command()
def tail(
    topic: Annotated[str, typer.Argument(help="Name without the run's prefix, such as ledger.")],
    count: Annotated[
        int, typer.Option("-n", "--count", min=0, help="Offsets of each partition to begin before its end.")
    ] = 10,
    partition: Annotated[int, typer.Option("-p", "--partition", help="Only this partition; -1: all.")] = -1,
    full: Annotated[bool, typer.Option("--full", help="Print arrays and texts whole.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="Stop after this time; 0: at Ctrl-C.")] = 0.0,
    folder: FolderOption = "",
    run: RunOption = "",
    bootstrap: ClusterOption = "",
    output: Output = Format.text,
) -> None:
    """Print records decoded as they are committed, the last ones first. With --format json: one object a line."""
    with reading(folder, run, bootstrap) as connection:
        start = -count if count else sys.maxsize
        for raw in coming_records(connection, topic, start, partition, seconds):
            _print_record(raw, output, full)
            sys.stdout.flush()


@app.command()
def create(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[@ FILE ... [KEY=VALUE ...]]", help="The run's configuration.")
    ] = None,
    run: Annotated[str, typer.Option("--run", help="Id of the run, where the configuration does not say.")] = "",
    bootstrap: ClusterOption = "",
    output: Output = Format.text,
) -> None:
    """Make the topics of a run ahead, with the partitions and settings it needs; what exists is left alone.

    Without a configuration: those of a run with one policy, main, and the default counts of partitions. `headrace run`
    makes missing topics by itself; this is for clusters where it may not.
    """
    from headrace.connectors.kafka import Connection
    from headrace.schemas.access import LAUNCHER
    from headrace.schemas.config import RunSection, default_kafka, load_config
    from headrace.schemas.topics import partition_counts

    kafka, section, policies = default_kafka(), RunSection(), ["main"]
    if words:
        config = load_config(*compositions(words))
        kafka, section, policies = config.kafka, config.run, config.policy_names()
    connection = Connection.of(kafka, run or section.id, bootstrap or None, role=LAUNCHER)
    connection.wait_for_broker()
    counts = partition_counts(policies, groups=section.group_partitions, inboxes=section.inboxes, lanes=section.lanes)
    made = connection.ensure_topics(counts)
    if output is Format.json:
        print_json({"run": connection.run, "created": made, "topics": counts})
    else:
        sys.stdout.write(f"run {connection.run}: {len(made)} topics created, {len(counts) - len(made)} were there\n")


@app.command()
def delete(
    run: Annotated[str, typer.Option("--run", help="Id of the run whose topics and groups are deleted.")],
    bootstrap: Annotated[str, typer.Option("--bootstrap", help="HOST:PORT of its Kafka.")],
    force: Annotated[bool, typer.Option("--force", help="Also while parts of the run are at work.")] = False,
) -> None:
    """Delete every topic and consumer group of a run on a cluster. There is no way back.

    Refused while a consumer group of the run has members.
    """
    from headrace.connectors.cluster_runs import busy_groups
    from headrace.connectors.kafka import Connection
    from headrace.schemas.access import LAUNCHER
    from headrace.schemas.config import default_kafka

    connection = Connection.of(default_kafka(), run, bootstrap, role=LAUNCHER)
    busy = [] if force else busy_groups(connection)
    if busy:
        raise ConfigurationError(f"run {run} is at work ({', '.join(busy)}): stop it first, or give --force")
    gone = connection.delete_run_topics()
    sys.stdout.write(f"deleted {len(gone)} topics of {run}\n")


def _row_of(topic: str) -> "TopicSpec | None":
    """The row of the map; None for a changelog, and for a topic that somebody else gave the run's prefix."""
    from headrace.schemas.topics import spec_of

    try:
        return None if topic.endswith("-changelog") else spec_of(topic)
    except KeyError:
        return None


def _print_record(raw: "RawRecord", output: Format, full: bool) -> None:
    if output is Format.json:
        sys.stdout.write(json.dumps(as_object(raw, full)) + "\n")
    else:
        sys.stdout.write("\n".join(record_lines(raw, full=full)) + "\n")
