"""``headrace workers``: who samples for a run, and holding a worker and letting it go on."""

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json, print_table
from headrace.pipeline.cli.reading import ClusterOption, FolderOption, RunOption, reading
from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.pipeline.workers import WorkerView
    from headrace.schemas.records import Resume, Suspend

__all__ = ("app",)

app = command_group("Rollout workers of a run: who they are; hold them, let them go on.")
_WRITER = "operators"
"""The role that writes to inboxes, where a cluster has logins by role."""
_MINUTES = 10.0
_MODULE = "headrace.pipeline.workers"

Minutes = Annotated[float, typer.Option("--minutes", min=0.0, help="Show who spoke so long before the newest word.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="WORKER", help="Names, or patterns such as 'gpu-*'.")]
Everyone = Annotated[bool, typer.Option("--all", help="Every worker of the run.")]
Seconds = Annotated[float, typer.Option("--seconds", min=0.1, help="Time in which the workers must have obeyed.")]


@app.command("list")
def list_workers(
    minutes: Minutes = _MINUTES,
    folder: FolderOption = "",
    run: RunOption = "",
    bootstrap: ClusterOption = "",
    output: Output = Format.text,
) -> None:
    """Every worker: role, state, slots, tasks, loaded versions, and when it spoke last."""
    with reading(folder, run, bootstrap, _MODULE) as connection:
        from headrace.pipeline.workers import Pool

        pool = Pool(connection, minutes)
        pool.catch_up()
        _show(pool.views(_now_ms()), output)


@app.command()
def suspend(
    workers: Names = None,
    everyone: Everyone = False,
    keep: Annotated[bool, typer.Option("--keep", help="They keep their tasks: for a short pause.")] = False,
    seconds: Seconds = 30.0,
    folder: FolderOption = "",
    run: RunOption = "",
    bootstrap: ClusterOption = "",
    output: Output = Format.text,
) -> None:
    """Let workers sample nothing and ask for nothing until they are resumed; others get their tasks."""
    from headrace.schemas.records import Suspend

    _steer(Suspend, workers or [], everyone, not keep, seconds, (folder, run, bootstrap), output)


@app.command()
def resume(
    workers: Names = None,
    everyone: Everyone = False,
    seconds: Seconds = 30.0,
    folder: FolderOption = "",
    run: RunOption = "",
    bootstrap: ClusterOption = "",
    output: Output = Format.text,
) -> None:
    """Let suspended workers go on."""
    from headrace.schemas.records import Resume

    _steer(Resume, workers or [], everyone, False, seconds, (folder, run, bootstrap), output)


def _steer(
    record: "type[Suspend] | type[Resume]", names: list[str], everyone: bool, hand_over: bool, seconds: float,
    place: tuple[str, str, str], output: Format,
) -> None:  # fmt: skip
    if bool(names) == everyone:
        verb = record.__name__.lower()
        raise ConfigurationError(f"say which: headrace workers {verb} WORKER ..., a pattern like 'gpu-*', or --all")
    with reading(*place, _MODULE, role=_WRITER) as connection:
        from headrace.pipeline.workers import Pool, choose, steer

        pool = Pool(connection, _MINUTES)
        pool.catch_up()
        if pool.ended:
            raise ConfigurationError(f"run {connection.run} has ended: it has no workers any more")
        wanted = ["*"] if everyone else names
        chosen = choose(pool.views(_now_ms()), wanted, record, hand_over=hand_over, now_ms=_now_ms())
        done = steer(connection, pool, chosen, record, hand_over=hand_over, seconds=seconds)
        left = [view.worker for view in pool.views(_now_ms()) if view.state in ("sampling", "idle")]
    _show(done, output)
    if not left:
        sys.stderr.write("no worker samples now: the run ends after run.patience_seconds without progress\n")


def _show(views: "list[WorkerView]", output: Format) -> None:
    if output is Format.json:
        print_json([_plain(view) for view in views])
        return
    header = ("worker", "role", "state", "slots", "room", "tasks", "versions", "seen")
    print_table(header, [_row(view) for view in views])


def _plain(view: "WorkerView") -> dict[str, Any]:
    return {**asdict(view), "slots": view.slots if view.slots >= 0 else None}


def _row(view: "WorkerView") -> tuple[object, ...]:
    tasks = ", ".join(f"{count} {kind}" for kind, count in view.tasks.items())
    versions = ", ".join(f"{name} {version}" for name, version in view.versions.items())
    room = max(0, view.capacity - sum(view.tasks.values())) if view.state in ("sampling", "idle") else 0
    ago = max(0, _now_ms() - view.seen_ms) / 1000
    slots = view.slots if view.slots >= 0 else "-"
    return view.worker, view.role, view.state, slots, room, tasks or "-", versions or "-", f"{ago:.0f} s ago"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
