"""``headrace run``: from a configuration to a run folder, with progress, or the next session of a run that exists."""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli.arguments import command_group, compositions
from headrace.schemas.errors import EXIT_FAILURE, HeadraceError

if TYPE_CHECKING:
    from headrace.connectors.kafka import Connection
    from headrace.pipeline.launch.folder import RunFolder
    from headrace.schemas.config import RunConfig

__all__ = ("app",)

app = command_group("Start a run, or go on with one.")
_INTERRUPTED = 130


@app.command()
def run(
    words: Annotated[
        list[str],
        typer.Argument(metavar="@ FILE [@ FILE ...] [KEY=VALUE ...]", help="TOML files, then single keys over them."),
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run: its folder, or the same files with run.id.")
    ] = False,
    rollback: Annotated[
        int,
        typer.Option("--from", metavar="V", min=-1, help="With --resume: train on from the weights of version V."),
    ] = -1,
    discard: Annotated[bool, typer.Option("--discard", help="With --from: drop the groups opened since then.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and the parts; start nothing.")
    ] = False,
) -> None:
    """Run a configuration: headrace run @ recipes/sort_digits/run.toml trainer.backend=torch

    Starts the local broker (unless kafka.bootstrap names a cluster), the operators, the source, trainers and rollout
    workers; shows progress; leaves RUNS/ID with report.html. Ctrl-C stops all of it and says how to go on.
    Exit codes: 0 finished, 1 failed, 78 configuration, 130 interrupted.
    """
    from headrace.pipeline.flow import validate
    from headrace.pipeline.launch.display import display_for
    from headrace.pipeline.launch.folder import RunFolder
    from headrace.pipeline.launch.launcher import Launcher
    from headrace.pipeline.launch.parts import Rollback
    from headrace.pipeline.launch.prepare import check_trainers, resolve
    from headrace.schemas.errors import ConfigurationError

    if rollback >= 0 and not resume:
        raise ConfigurationError("--from V goes back within a run that exists: add --resume")
    by_folder = resume and not words[0].startswith("@") and "=" not in words[0]
    files, overrides = ([words[0]], words[1:]) if by_folder else compositions(words)
    config = resolve(files, overrides, resume=resume)
    validate(config)
    if dry_run:
        _print_plan(config)
        return
    if not resume or config != RunFolder.of(config).read_config():  # what the run has begun with, its trainers took
        check_trainers(config)
    display = display_for(terminal=sys.stdout.isatty())
    command = ["headrace", "run", *words]
    failure: HeadraceError | None = None
    outcome = "failed"
    back = Rollback(rollback, discard) if rollback >= 0 else None
    with Launcher(config, resume=resume, rollback=back, command=command, display=display) as launcher:
        folder = launcher.folder.path
        try:
            outcome = launcher.run(_write_report)
        except HeadraceError as error:
            failure = error
        except OSError as error:
            failure = HeadraceError(f"{error}; the run ends here, what it has written stays")
        finally:
            display.close()
    again = f"headrace run {shlex.quote(str(folder))} --resume"
    if failure is not None:
        if isinstance(failure, ConfigurationError):
            raise failure
        sys.stderr.write(f"headrace run: {failure}\n")
    if outcome != "finished":
        sys.stdout.write(f"to go on: {again}\n")
    sys.stdout.write(f"run: {folder}\n")
    if outcome != "finished":
        raise typer.Exit(_INTERRUPTED if outcome == "interrupted" else EXIT_FAILURE)


def _write_report(folder: "RunFolder", connection: "Connection") -> None:
    """Write the report while the broker is up; a run is not failed by a report that cannot be made."""
    from headrace.pipeline.launch.best import export_best
    from headrace.pipeline.report import write_report

    try:
        figures = write_report(folder, connection)
    except (HeadraceError, OSError) as error:
        sys.stderr.write(f"headrace run: no report: {error}\n")
        return
    for line in figures.summary():
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
    try:
        export_best(folder, figures.policies, lambda text: print(text, flush=True))
    except (HeadraceError, OSError) as error:
        sys.stderr.write(f"headrace run: the best version was not exported: {error}\n")


def _print_plan(config: "RunConfig") -> None:
    from headrace.pipeline.launch.folder import RunFolder
    from headrace.pipeline.launch.parts import parts_of

    sys.stdout.write(config.model_dump_json(indent=2) + "\n")
    for part in parts_of(config, RunFolder.of(config).config, config.kafka.bootstrap or "LOCAL"):
        sys.stdout.write(f"{part.name}: {shlex.join(part.command)}\n")
