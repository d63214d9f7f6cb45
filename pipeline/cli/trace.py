"""``headrace trace``: the life of one prompt, record by record, from its row to the step that trained it."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json
from headrace.pipeline.cli.reading import ClusterOption, FolderOption, RunOption, reading, when

if TYPE_CHECKING:
    from headrace.pipeline.tracing import Event

__all__ = ("app",)

app = command_group("Follow one prompt from its record to the step that trained it.")


@app.command()
def trace(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT_ID", help="16 hex digits, or the dataset's own id.")],
    folder: FolderOption = "",
    run: RunOption = "",
    bootstrap: ClusterOption = "",
    output: Output = Format.text,
) -> None:
    """Print what happened to a prompt in the order of time, each line with the place of its record.

    Exit codes: 0 found, 1 the run has no prompt of this id.
    """
    with reading(folder, run, bootstrap, "headrace.pipeline.tracing") as connection:
        from headrace.pipeline.tracing import follow

        events = follow(connection, prompt)
    if output is Format.json:
        print_json([event.plain() for event in events])
    else:
        _print(events)
    if not events:
        sys.stderr.write(f"no prompt {prompt} in this run\n")
        raise typer.Exit(1)


def _print(events: "list[Event]") -> None:
    for event in events:
        sys.stdout.write(f"{when(event.time_ms)}  {event.place:24}  {event.text}\n")
