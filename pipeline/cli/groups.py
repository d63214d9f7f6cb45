"""``headrace groups``: how far each stage of a run has read."""

from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json, print_table
from headrace.pipeline.cli.reading import ClusterOption, FolderOption, RunOption, reading
from headrace.schemas.ids import unprefixed

__all__ = ("app",)

app = command_group("Positions of the consumer groups of a run.", nested=True)
_SECONDS = 15.0
_COLUMNS = ("group", "topic", "partition", "position", "end", "lag")


@app.command()
def lag(
    folder: FolderOption = "", run: RunOption = "", bootstrap: ClusterOption = "", output: Output = Format.text
) -> None:
    """Committed position, end and distance of every partition that a group of the run reads."""
    rows: list[tuple[Any, ...]] = []
    with reading(folder, run, bootstrap) as connection:
        admin = connection.admin()
        listed = admin.list_consumer_groups(request_timeout=_SECONDS).result(_SECONDS)
        names = sorted(g.group_id for g in listed.valid if g.group_id.startswith(f"{connection.run}."))
        ends: dict[str, dict[int, int]] = {}
        for name in names:
            asked = admin.list_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(name)], require_stable=False, request_timeout=_SECONDS
            )
            for place in asked[name].result(_SECONDS).topic_partitions:
                topic = unprefixed(connection.run, place.topic)
                if topic not in ends:
                    ends[topic] = connection.end_offsets(topic)
                end = ends[topic].get(place.partition, 0)
                short = unprefixed(connection.run, name)
                rows.append((short, topic, place.partition, place.offset, end, max(0, end - place.offset)))
    rows.sort()
    if output is Format.json:
        print_json([dict(zip(_COLUMNS, row, strict=True)) for row in rows])
    else:
        print_table(_COLUMNS, rows)
