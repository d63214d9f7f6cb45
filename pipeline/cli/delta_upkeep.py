"""`headrace deltas merge|compact|prune`: what keeps a store of weights small and quick for readers that lag.

A run folder or a store URL in; merged deltas, or fewer objects out. Each may be killed and started again.
"""

import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from headrace.pipeline.cli.arguments import Bootstrap, Format, Output, print_json
from headrace.pipeline.cli.delta_place import Place, Policy, RunId, Where, place_of

__all__ = ("compact", "merge", "prune")

Held = Annotated[list[int] | None, typer.Option("--held", help="A version that a reader or checkpoint needs.")]


def merge(where: Where, run: RunId = "", policy: Policy = "") -> None:
    """Make the merged deltas over 4 and 16 versions that are due, once."""
    from headrace.pipeline.delta_compact import Compactor

    place = place_of(where, run, policy)
    done = Compactor(place.store, place.run, place.policy).run()
    sys.stdout.write(f"{len(done)} merged: {', '.join(f'{a} to {b}' for a, b in done) or 'nothing was due'}\n")


def compact(
    where: Where,
    run: RunId = "",
    policy: Policy = "",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 10.0,
) -> None:
    """Follow the chain and merge as versions come, until it is stopped; a store that is away is asked again."""
    from headrace.connectors.lifetime import StopSignal
    from headrace.connectors.stores.store import StoreUnavailable
    from headrace.pipeline.delta_compact import Compactor

    place = place_of(where, run, policy)
    compactor = Compactor(place.store, place.run, place.policy)
    stop = StopSignal().listen(with_parent=False)
    while True:
        try:
            for first, version in compactor.run():
                sys.stdout.write(f"merged {first} to {version}\n")
        except StoreUnavailable as error:
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} waiting for the object store: {error}\n")
        sys.stdout.flush()
        if stop.wait(interval):
            return


def prune(
    where: Where,
    run: RunId = "",
    policy: Policy = "",
    held: Held = None,
    readers: Annotated[bool, typer.Option(help="Ask the run's topic `demand` which versions workers hold.")] = True,
    grace: Annotated[float, typer.Option(help="Seconds during which a version's objects are never deleted.")] = 3600.0,
    orphans: Annotated[float, typer.Option(help="Age in seconds from which objects without manifest go.")] = 3600.0,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
    bootstrap: Bootstrap = "",
    output: Output = Format.text,
) -> None:
    """Delete versions that nobody needs: below the newest two fulls, living readers and the oldest kept checkpoint."""
    from headrace.pipeline.delta_prune import prune as prune_chain

    place = place_of(where, run, policy)
    done = prune_chain(
        place.store,
        place.run,
        place.policy,
        held=_live(place, bootstrap) if readers else (),
        checkpoints=[*(held or ()), *_checkpoints(place)],
        grace_seconds=grace,
        orphan_seconds=orphans,
        dry=dry_run,
    )
    if output is Format.json:
        print_json(asdict(done))
        return
    verb = "would go" if dry_run else "deleted"
    sys.stdout.write(
        f"{done.objects} objects of {len(done.versions)} versions {verb} ({done.nbytes} bytes, {done.orphans} without "
        f"manifest), {done.unfinished} unfinished uploads removed; kept from version {done.floor} on\n"
    )


def _live(place: Place, bootstrap: str) -> list[int]:
    """Versions that living workers of a run folder hold; of a bare store nobody knows, so name them with --held."""
    if place.folder is None:
        return []
    from headrace.pipeline.cli.reading import reading
    from headrace.pipeline.delta_prune import live_versions
    from headrace.schemas.config import read_config

    names = read_config(place.folder / "config.json").policy_names()
    with reading(str(place.folder), "", bootstrap) as connection:
        return live_versions(connection, names.index(place.policy))


def _checkpoints(place: Place) -> list[int]:
    """Versions of the kept checkpoints of a run folder."""
    if place.folder is None:
        return []
    from headrace.pipeline.proofs.facts import checkpoint_facts

    return [fact.version for fact in checkpoint_facts(place.folder / "checkpoints" / place.policy)]
