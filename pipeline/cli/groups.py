"""``headrace groups``: how far each stage of a run has read."""

from typing import Any

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json, print_table
from headrace.pipeline.cli.reading import ClusterOption, FolderOption, RunOption, reading, topics_of
from headrace.schemas.ids import unprefixed

__all__ = ("app",)

app = command_group("Positions of the consumer groups of a run.", nested=True)
_COLUMNS = ("group", "topic", "partition", "position", "end", "lag")


@app.command()
def lag(
    folder: FolderOption = "", run: RunOption = "", bootstrap: ClusterOption = "", output: Output = Format.text
) -> None:
    """Committed position, end and distance of every partition that a group of the run reads.

    Positions in changelogs, which other tools show with a growing lag, are marks of workers: nobody reads them.
    """
    from headrace.connectors.cluster_runs import positions_of

    rows: list[tuple[Any, ...]] = []
    with reading(folder, run, bootstrap) as connection:
        topics = topics_of(connection)
        ends: dict[str, dict[int, int]] = {}
        for group, places in positions_of(connection).items():
            for place in places:
                topic = unprefixed(connection.run, place.topic)
                if topic not in topics or place.topic == topic or topic.endswith("-changelog"):
                    continue
                if topic not in ends:
                    ends[topic] = connection.end_offsets(topic)
                end = ends[topic].get(place.partition, 0)
                short = unprefixed(connection.run, group)
                rows.append((short, topic, place.partition, place.offset, end, max(0, end - place.offset)))
    rows.sort()
    if output is Format.json:
        print_json([dict(zip(_COLUMNS, row, strict=True)) for row in rows])
    else:
        print_table(_COLUMNS, rows)
