"""``headrace janitor``: free a cluster and an object store of runs and arrays that nobody needs, by clear rules.

Without ``--delete`` it only says what would go, and why what stays does. Fit for a cron job.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli.arguments import Bootstrap, Folder, Format, Output, command_group, print_json, print_table

if TYPE_CHECKING:
    from headrace.schemas.config import KafkaConfig

__all__ = ("app",)

app = command_group("Delete what finished and orphaned runs left behind; a live run is never touched.")

Delete = Annotated[bool, typer.Option("--delete", help="Do it; without this only say what would go.")]
_DAY = 86_400.0


@app.command()
def runs(
    bootstrap: Annotated[str, typer.Option("--bootstrap", help="HOST:PORT of the cluster.")] = "",
    config: Annotated[str, typer.Option(help="File whose [kafka] section says how to log in.")] = "",
    store: Annotated[str, typer.Option(help="Object store of the runs: their offloaded arrays go with them.")] = "",
    finished_days: Annotated[float, typer.Option(min=0, help="Days after its end from which a run goes.")] = 7.0,
    orphaned_days: Annotated[
        float, typer.Option(min=0, help="Days of silence after which an unended run goes.")
    ] = 30.0,
    quiet_seconds: Annotated[float, typer.Option(min=0, help="A run with a younger record is live.")] = 3600.0,
    delete: Delete = False,
    output: Output = Format.text,
) -> None:
    """Topics and consumer groups of all runs on a cluster: what is live, and what goes."""
    from headrace.connectors.stores.open import open_store
    from headrace.pipeline.janitor import Rules, delete_run, verdicts

    section = _section(config)
    rules = Rules(quiet=quiet_seconds, finished_after=finished_days * _DAY, orphaned_after=orphaned_days * _DAY)
    opened = open_store(store) if store else None
    rows = []
    for verdict in verdicts(section, bootstrap or section.bootstrap, rules):
        objects, done = 0, "goes" if verdict.goes else "stays"
        if verdict.goes and delete:
            now, objects = delete_run(section, bootstrap or section.bootstrap, verdict.run, rules, opened)
            done = "deleted" if now is None or now.goes else f"stays: {now.reason}"
        rows.append({**asdict(verdict), "done": done, "objects": objects})
    if output is Format.json:
        print_json(rows)
        return
    names = ("run", "state", "topics", "done", "reason")
    print_table(names, [[row[name] for name in names] for row in rows])
    if not delete and any(row["goes"] for row in rows):
        sys.stdout.write("nothing was deleted: give --delete\n")


@app.command()
def blobs(
    folder: Folder,
    bootstrap: Bootstrap = "",
    grace: Annotated[float, typer.Option(min=0, help="Seconds during which an object is never deleted.")] = 600.0,
    delete: Delete = False,
    output: Output = Format.text,
) -> None:
    """Offloaded arrays of one run whose groups have ended and that no checkpoint or replay can lead back to."""
    from headrace.connectors.stores.open import open_store
    from headrace.pipeline.blob_sweep import read_needs, sweep_blobs
    from headrace.pipeline.cli.reading import reading
    from headrace.pipeline.proofs.facts import kept_checkpoints
    from headrace.schemas.config import read_config

    config = read_config(folder / "config.json")
    kept = {
        policy: [fact.batch for fact in kept_checkpoints(config, name, folder / "checkpoints" / name)]
        for policy, name in enumerate(config.policy_names())
    }
    with reading(str(folder), "", bootstrap) as connection:
        needs = read_needs(connection, config, kept)
    orphans = 2 * config.group_deadline_ms() / 1000
    place = open_store(config.store, Path(folder))
    done = sweep_blobs(place, config.run.id, needs, orphan_seconds=orphans, grace_seconds=grace, dry=not delete)
    if output is Format.json:
        print_json({**asdict(done), "deleted": delete})
        return
    verb = "deleted" if delete else "would go (give --delete)"
    sys.stdout.write(
        f"{done.objects} objects of {done.nbytes} bytes {verb}, {done.orphans} of them of no admitted group; "
        f"{done.kept} stay\n"
    )


def _section(config: str) -> "KafkaConfig":
    from headrace.schemas.config import KafkaConfig, read_kafka_section

    return read_kafka_section(config) if config else KafkaConfig()
