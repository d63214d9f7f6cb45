"""`headrace deltas merge|compact|prune`: what keeps a store of weights small and quick for readers that lag.

A run folder or a store URL in; merged deltas, or fewer objects out. Each may be killed and started again.
"""

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from headrace.pipeline.cli.arguments import Bootstrap, Format, Output, print_json
from headrace.pipeline.cli.delta_place import Place, Policy, RunId, Where, place_of

__all__ = ("compact", "merge", "prune")

Interval = Annotated[float, typer.Option(help="Seconds between two looks.")]
Held = Annotated[list[int] | None, typer.Option("--held", help="A version that a reader or checkpoint needs.")]


def merge(where: Where, run: RunId = "", policy: Policy = "") -> None:
    """Make the merged deltas over 4 and 16 versions that are due, once."""
    from headrace.pipeline.delta_compact import Compactor

    place = place_of(where, run, policy)
    done = Compactor(place.store, place.run, place.policy).run()
    sys.stdout.write(f"{len(done)} merged: {', '.join(f'{a} to {b}' for a, b in done) or 'nothing was due'}\n")


def compact(where: Where, run: RunId = "", policy: Policy = "", interval: Interval = 10.0) -> None:
    """Follow the chain and merge as versions come, until it is stopped; a store that is away is asked again."""
    from headrace.connectors.lifetime import StopSignal
    from headrace.pipeline.delta_compact import Compactor
    from headrace.pipeline.delta_upkeep import in_rounds, merge_due

    place = place_of(where, run, policy)
    compactor = Compactor(place.store, place.run, place.policy)
    stop = StopSignal().listen(with_parent=False)
    in_rounds(interval, stop, lambda: merge_due(compactor, stop.is_set, _say))


def prune(
    where: Where,
    run: RunId = "",
    policy: Policy = "",
    held: Held = None,
    readers: Annotated[bool, typer.Option(help="Ask the run's topic `demand` which versions workers hold.")] = True,
    grace: Annotated[float, typer.Option(help="Seconds during which a version's objects are never deleted.")] = 3600.0,
    orphans: Annotated[float, typer.Option(help="Age in seconds from which objects without manifest go.")] = 3600.0,
    max_lag: Annotated[int, typer.Option(help="Versions behind the head from which workers hold nothing.")] = 512,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
    interval: Annotated[float, typer.Option(help="Again every so many seconds, until stopped; 0: once.")] = 0.0,
    bootstrap: Bootstrap = "",
    output: Output = Format.text,
) -> None:
    """Delete versions that nobody needs: below the newest two fulls, living readers and the oldest kept checkpoint.

    The best version by the run's evaluations stays too.
    """
    from headrace.connectors.lifetime import StopSignal
    from headrace.pipeline.delta_prune import prune as prune_chain
    from headrace.pipeline.delta_upkeep import in_rounds

    place = place_of(where, run, policy)

    def once() -> None:
        live, evaluated = _needed(place, bootstrap) if readers else ([], [])
        done = prune_chain(
            place.store,
            place.run,
            place.policy,
            held=live,
            checkpoints=[*(held or ()), *_checkpoints(place)],
            single=evaluated,
            grace_seconds=grace,
            orphan_seconds=orphans,
            max_lag=max_lag,
            dry=dry_run,
        )
        if output is Format.json:
            print_json(asdict(done))
            return
        verb = "would go" if dry_run else "deleted"
        _say(
            f"{done.objects} objects of {len(done.versions)} versions {verb} ({done.nbytes} bytes, {done.orphans} "
            f"without manifest), {done.unfinished} unfinished uploads removed; kept from version {done.floor} on"
        )

    if interval > 0:
        in_rounds(interval, StopSignal().listen(with_parent=False), once)
    else:
        once()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _needed(place: Place, bootstrap: str) -> tuple[list[int], list[int]]:
    """Versions that living workers of a run folder hold, and those that its evaluations need.

    Of a bare store nobody knows, so name them with --held.
    """
    if place.folder is None:
        return [], []
    from headrace.pipeline.cli.reading import reading
    from headrace.pipeline.delta_prune import live_versions
    from headrace.pipeline.delta_upkeep import evaluated_versions
    from headrace.schemas.config import read_config

    config = read_config(place.folder / "config.json")
    with reading(str(place.folder), "", bootstrap) as connection:
        live = live_versions(connection, config.policy_names().index(place.policy))
        return live, evaluated_versions(config, place.store, place.policy, connection)


def _checkpoints(place: Place) -> list[int]:
    """Versions of the kept checkpoints of a run folder."""
    if place.folder is None:
        return []
    from headrace.pipeline.delta_upkeep import checkpoint_versions
    from headrace.schemas.config import read_config

    config = read_config(place.folder / "config.json")
    return list(checkpoint_versions(config, place.store, place.policy))
