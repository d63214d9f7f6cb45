"""``headrace replay``: what other operators would have decided on a run's records."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, compositions, print_json, print_table
from headrace.pipeline.cli.reading import ClusterOption, FolderOption, newest_run
from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.pipeline.replay import Comparison

__all__ = ("app",)

app = command_group("Run a stage again over recorded records.")


@app.command()
def replay(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[@ FILE ... ] [KEY=VALUE ...]", help="What differs from the run's configuration."),
    ] = None,
    stage: Annotated[str, typer.Option(help="The stage to run again: assemble, where operators decide.")] = "assemble",
    offsets: Annotated[
        str, typer.Option("--offsets", metavar="A:B", help="Compare what was decided at these offsets of trajectories.")
    ] = "",
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="Differences to print; 0: all.")] = 20,
    folder: FolderOption = "",
    bootstrap: ClusterOption = "",
    output: Output = Format.text,
) -> None:
    """Decide again about every group of a run and compare: headrace replay 'operators=[]' --folder runs/ID

    The run is only read; its state is built up from its first record, whatever the range. Without differing settings
    every decision must be the recorded one.
    """
    from headrace.connectors.kafka import Connection
    from headrace.pipeline.flow import validate
    from headrace.pipeline.launch.folder import RunFolder
    from headrace.pipeline.launch.local_broker import broker_of
    from headrace.pipeline.replay import STAGE, Replay
    from headrace.schemas.config import load_config

    if stage != STAGE:
        raise ConfigurationError(
            f"--stage {stage}: only {STAGE} can be run again by itself; schedule and batch decide by what workers and "
            "trainers do at the same time, which other decisions would have changed"
        )
    place = RunFolder.existing(folder or newest_run())
    given = words or []
    files, overrides = compositions(given) if any(w.startswith("@") for w in given) else ([], given)
    config = load_config([place.config, *files], overrides)
    validate(config)
    first, last = _range(offsets)
    with broker_of(place, bootstrap) as address:
        compared = Replay(Connection.of(config.kafka, config.run.id, address), config, first=first, last=last).run()
    if output is Format.json:
        print_json(_plain(compared))
    else:
        _print(compared, count)


def _range(text: str) -> tuple[int, int]:
    """``A:B``, the last excluded, either left out; (0, -1) for all.

    >>> _range("10:20"), _range("5:"), _range(":7"), _range("")
    ((10, 20), (5, -1), (0, 7), (0, -1))
    """
    first, _, last = text.partition(":")
    try:
        out = int(first or 0), int(last or -1)
    except ValueError:
        out = (-1, -1)
    if out[0] < 0 or (last and out[1] < out[0]):
        raise ConfigurationError(f"--offsets {text!r} is not of the form A:B with 0 <= A <= B")
    return out


def _plain(compared: "Comparison") -> dict[str, object]:
    verdicts = [
        {"recorded": then, "replayed": now, "groups": many} for (then, now), many in sorted(compared.verdicts.items())
    ]
    differences = [
        {"group": d.group, "policy": d.policy, "place": d.place, "recorded": d.recorded, "replayed": d.replayed}
        for d in compared.differences
    ]
    return {
        "groups": compared.groups, "records": compared.records, "undecodable": compared.undecodable,
        "verdicts": verdicts, "differences": differences,
    }  # fmt: skip


def _print(compared: "Comparison", count: int) -> None:
    rows = [(then, now, many) for (then, now), many in sorted(compared.verdicts.items())]
    print_table(("recorded", "replayed", "groups"), rows)
    shown = compared.differences[: count or None]
    if shown:
        sys.stdout.write("\n")
        print_table(
            ("group", "policy", "place", "recorded", "replayed"),
            [(d.group, d.policy, d.place, d.recorded, d.replayed) for d in shown],
        )
    sys.stdout.write(f"{compared.groups} groups compared, {len(compared.differences)} decided otherwise\n")
