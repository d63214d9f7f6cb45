"""``headrace dead-letters``: records that a stage could not use, where they lay and why; and back again."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json, print_table
from headrace.pipeline.cli.reading import ClusterOption, FolderOption, RunOption, reading, when
from headrace.schemas.ids import unprefixed

if TYPE_CHECKING:
    from headrace.connectors.kafka import RawRecord

__all__ = ("app",)

app = command_group("Records that a stage could not use.")
_PREFIX = "__streams.errors."
_SHOWN_BYTES = 256


@app.command("list")
def list_letters(
    folder: FolderOption = "", run: RunOption = "", bootstrap: ClusterOption = "", output: Output = Format.text
) -> None:
    """All dead letters with their origin, size and reason."""
    with reading(folder, run, bootstrap) as connection:
        letters = [_about(raw, connection.run) for raw in connection.read_topic("dead-letters")]
    if output is Format.json:
        print_json(letters)
        return
    columns = ("offset", "time", "stage", "origin", "bytes", "exception", "message")
    print_table(columns, [[str(letter[name])[:100] for name in columns] for letter in letters])
    sys.stderr.write(f"{len(letters)} dead letters\n")


@app.command()
def show(
    offset: Annotated[int, typer.Argument(help="Offset in dead-letters, as `list` says.")],
    folder: FolderOption = "",
    run: RunOption = "",
    bootstrap: ClusterOption = "",
    output: Output = Format.text,
) -> None:
    """One dead letter: every header, the stack trace, and the beginning of its bytes."""
    with reading(folder, run, bootstrap) as connection:
        found = next((r for r in connection.read_topic("dead-letters", {0: offset}) if r.offset == offset), None)
    if found is None:
        sys.stderr.write(f"dead-letters[0]@{offset} does not exist\n")
        raise typer.Exit(1)
    headers = {name: (value or b"").decode("utf-8", "backslashreplace") for name, value in found.headers}
    value = found.value or b""
    if output is Format.json:
        print_json({**_about(found, connection.run), "headers": headers, "value_hex": value[:_SHOWN_BYTES].hex()})
        return
    for name, text in headers.items():
        sys.stdout.write(f"{name}: {text}\n")
    sys.stdout.write(f"value: {len(value)} bytes, beginning {value[:_SHOWN_BYTES]!r}\n")


@app.command()
def requeue(
    offset: Annotated[int, typer.Argument(help="Offset in dead-letters, as `list` says.")],
    value: Annotated[str, typer.Option("--value", metavar="FILE", help="Mended bytes to write instead.")] = "",
    again: Annotated[bool, typer.Option("--again", help="Also when it was put back before.")] = False,
    folder: FolderOption = "",
    run: RunOption = "",
    bootstrap: ClusterOption = "",
    output: Output = Format.text,
) -> None:
    """Put a dead letter back into the topic that it came from, for its stage to try again."""
    from pathlib import Path

    from headrace.pipeline.requeue import requeue as put_back

    mended = Path(value).read_bytes() if value else None
    with reading(folder, run, bootstrap) as connection:
        place = put_back(connection, offset, value=mended, again=again)
    if output is Format.json:
        print_json({"letter": offset, "place": str(place)})
    else:
        sys.stdout.write(f"dead-letters[0]@{offset} is {place} now\n")


def _about(raw: "RawRecord", run: str) -> dict[str, Any]:
    headers = {name: (value or b"").decode("utf-8", "backslashreplace") for name, value in raw.headers}
    topic = unprefixed(run, headers.get(f"{_PREFIX}topic", ""))
    origin = (
        f"{topic}[{headers.get(f'{_PREFIX}partition', '')}]@{headers.get(f'{_PREFIX}offset', '')}" if topic else "-"
    )
    return {
        "offset": raw.offset,
        "time": when(raw.timestamp_ms),
        "stage": headers.get("hr-stage", ""),
        "origin": origin,
        "bytes": len(raw.value or b""),
        "exception": headers.get(f"{_PREFIX}exception", ""),
        "message": headers.get(f"{_PREFIX}message", ""),
    }
