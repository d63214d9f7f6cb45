"""The compactor and the garbage collector of a run as processes: ``python -m headrace.pipeline.delta_upkeep``.

Goes in: a run's configuration; comes out: merged deltas for workers that lag, or fewer objects in the store, round by
round. Each may be killed at any point and run twice at once; while the store, the brokers or the checkpoints cannot be
read, nothing is deleted.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headrace.connectors.checkpoints import BrokenCheckpoint, checkpoint_prefix, in_folder, in_store
from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_errors import BrokerUnreachable
from headrace.connectors.lifetime import StopSignal, exit_with
from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.open import open_store
from headrace.connectors.stores.store import ObjectStore, StoreUnavailable
from headrace.pipeline.delta_compact import Compactor
from headrace.pipeline.delta_prune import ORPHAN_SECONDS, Pruned, live_versions, prune
from headrace.pipeline.evaluated import EvaluationTally
from headrace.pipeline.evaluation import is_due
from headrace.schemas.config import RunConfig, read_config
from headrace.schemas.delta_layout import DeltaError
from headrace.schemas.records import EvalResult

__all__ = ("checkpoint_versions", "evaluated_versions", "in_rounds", "main", "merge_due", "prune_run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and work until stopped; returns the exit code (``schemas.errors``)."""
    parser = argparse.ArgumentParser(prog="python -m headrace.pipeline.delta_upkeep", description="Keep weights small.")
    parser.add_argument("--config", required=True, help="the run's resolved configuration (config.json)")
    parser.add_argument("--task", required=True, choices=("compact", "prune"), help="what to do")
    parser.add_argument("--instance", default="upkeep", help="this process's name")
    parser.add_argument("--bootstrap", default="", help="Kafka address, instead of kafka.bootstrap")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when standard input closes")
    given = parser.parse_args(arguments)
    stop = StopSignal().listen(with_parent=given.exit_with_parent)
    return exit_with(lambda: _work(given, stop))


def _work(given: argparse.Namespace, stop: StopSignal) -> int | None:
    config = read_config(given.config)
    store = open_store(config.store, config.run_folder())
    if given.task == "compact":
        compactors = [Compactor(store, config.run.id, name) for name in config.policy_names()]

        def compact_all() -> None:
            for one in compactors:
                merge_due(one, stop.is_set, _say)

        in_rounds(config.store.compact_seconds, stop, compact_all)
        return None
    connection = Connection.of(config.kafka, config.run.id, given.bootstrap or None)
    connection.wait_for_broker(stopped=stop.is_set)

    def prune_all() -> None:
        for name in config.policy_names():
            done = prune_run(config, store, name, connection)
            if done.objects or done.unfinished:
                _say(
                    f"{name}: {done.objects} objects of {len(done.versions)} versions deleted ({done.nbytes} bytes, "
                    f"{done.orphans} without manifest), {done.unfinished} unfinished uploads; kept from {done.floor} on"
                )

    in_rounds(config.store.prune_seconds, stop, prune_all)
    return None


def in_rounds(seconds: float, stop: StopSignal, work: Callable[[], object]) -> None:
    """Work every so many seconds until stopped; what is away or damaged for a time is said and tried again."""
    troubled = False
    while not stop.is_set():
        try:
            work()
        except StoreUnavailable as error:
            troubled = True
            _say(f"waiting for the object store: {error}")
        except BrokerUnreachable as error:
            troubled = True
            _say(f"waiting for the brokers, nothing is deleted: {error}")
        except DeltaError as error:
            troubled = True
            _say(f"this round was given up: {error}")
        else:
            if troubled:  # the last words of a part are taken for what it waits for
                _say("going on")
            troubled = False
        stop.wait(seconds)


def merge_due(compactor: Compactor, stopped: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Make the merged deltas that are due, one after the other until ``stopped``."""
    for first, version in compactor.due():
        if stopped():
            return
        if compactor.try_merge(first, version):
            say(f"{compactor.policy}: merged {first} to {version}")


def prune_run(
    config: RunConfig, store: ObjectStore, policy: str, connection: Connection, *, dry: bool = False
) -> Pruned:
    """Prune a policy as its run's configuration says.

    Spared are what living workers hold, what kept checkpoints have, and the best version by the run's evaluations.

    Raises the errors of the store and the brokers, and BrokenCheckpoint, before anything is deleted.
    """
    settings = config.store
    return prune(
        store,
        config.run.id,
        policy,
        held=live_versions(connection, config.policy_names().index(policy)),
        checkpoints=checkpoint_versions(config, store, policy),
        single=evaluated_versions(config, store, policy, connection),
        grace_seconds=settings.prune_grace_seconds,
        # Never less: a trainer that waits for the store still commits what it has uploaded half that time ago.
        orphan_seconds=max(settings.prune_grace_seconds, ORPHAN_SECONDS),
        max_lag=settings.prune_max_lag,
        dry=dry,
    )


def evaluated_versions(config: RunConfig, store: ObjectStore, policy: str, connection: Connection) -> list[int]:
    """Committed versions that evaluations need: the best so far, and those whose evaluation has not ended yet.

    Raises BrokerUnreachable and the store's errors.
    """
    evaluation = config.eval
    if not evaluation.dataset or not evaluation.best:
        return []
    index = config.policy_names().index(policy)
    tally = EvaluationTally()
    for raw in connection.read_topic("evals"):
        record = raw.decoded_if_ours()
        if isinstance(record, EvalResult) and record.policy == index:
            tally.fold(record)
    whole, best = tally.whole(evaluation), tally.best(evaluation)
    after = whole[-1] if whole else -1
    due = [v for v in Chain(store, config.run.id, policy).versions(after) if is_due(evaluation, v)]
    return [*due, *([best.version] if best is not None else [])]


def checkpoint_versions(config: RunConfig, store: ObjectStore, policy: str) -> Iterator[int]:
    """Versions of the kept checkpoints of a policy, wherever ``trainer.checkpoint_url`` puts them.

    A broken one holds nothing: training never resumes from it. Raises the store's errors.
    """
    url = config.trainer_of(policy).checkpoint_url
    prefix = checkpoint_prefix(config.run.id, policy)
    if not url:
        found = in_folder(config.run_folder() / "checkpoints" / policy)
    else:
        kept = store if url == "store" else open_store(config.store.model_copy(update={"url": url}), Path())
        found = ((Path(key), table) for key, table in in_store(kept, prefix))
    for _, table in found:
        if not isinstance(table, BrokenCheckpoint):
            yield table.version


def _say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
