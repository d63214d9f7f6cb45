"""``python -m headrace.trainers``: the trainer of one policy as a process, alone or as a rank under torchrun."""

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal, exit_with
from headrace.connectors.schema_ids import take_schema_ids
from headrace.connectors.stores.open import open_store
from headrace.connectors.stores.probe import open_for_commits
from headrace.connectors.stores.store import ObjectStore
from headrace.schemas.config import RunConfig, TrainerConfig, read_config
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Stop
from headrace.trainers.same_tokenizer import check_tokenizer

__all__ = ("main",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and train; returns the exit code (``schemas.errors``)."""
    parser = argparse.ArgumentParser(prog="python -m headrace.trainers", description="Train one policy of a run.")
    parser.add_argument("--config", required=True, help="the run's resolved configuration (config.json)")
    parser.add_argument("--policy", required=True, help="the policy to train")
    parser.add_argument("--instance", required=True, help="this process's name; a successor takes the same")
    parser.add_argument("--bootstrap", default="", help="Kafka address, instead of kafka.bootstrap")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when standard input closes")
    parser.add_argument("--resume-from", type=int, metavar="V", help="go back to the checkpoint at or before version V")
    parser.add_argument("--discard", action="store_true", help="with --resume-from: drop the groups opened since")
    parser.add_argument(
        "--local_rank", type=int, help="given by the deepspeed launcher, which says so in LOCAL_RANK too"
    )
    given = parser.parse_args(arguments)
    stop = StopSignal().listen(with_parent=given.exit_with_parent)
    code = exit_with(lambda: _train(given, stop))
    sys.stderr.flush()
    return code


def _train(given: argparse.Namespace, stop: StopSignal) -> int | None:
    config = read_config(given.config)
    if given.policy not in config.policies:
        raise ConfigurationError(f"--policy {given.policy}: the run's policies are {', '.join(config.policies)}")
    trainer = config.trainer_of(given.policy)
    connection = Connection.of(config.kafka, config.run.id, given.bootstrap or None, role="trainer")
    connection.patient(stop.is_set).wait_for_broker()
    take_schema_ids(connection, config.registry)
    check_tokenizer(connection, config.policies[given.policy].model)
    _check_ranks(trainer, connection.partition_count(f"batches.{given.policy}"))
    if _has_stopped(connection, config.policy_names().index(given.policy)):
        if given.resume_from is not None:
            raise ConfigurationError("--resume-from is refused: this policy has stopped (its Stop stands in steps)")
        sys.stderr.write(f"policy {given.policy} has stopped; nothing to do\n")
        return None

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with stop.at_once():
        from headrace.trainers.backends.open import open_rank
        from headrace.trainers.batch_to_step import Rewind, Trainer
        from headrace.trainers.lanes import Stopped

        ranks, backend = open_rank(config, given.policy)
        store = _store(config, leads=ranks.leads)
        gc.freeze()
    rewind = Rewind(version=given.resume_from, discard=given.discard) if given.resume_from is not None else None
    worker = Trainer(
        config,
        given.policy,
        instance=given.instance,
        connection=connection,
        store=store,
        backend=backend,
        ranks=ranks,
        stop=stop,
        rewind=rewind,
    )
    try:
        worker.run()
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
    except RuntimeError:  # another rank left first
        if ranks.size == 1 or not stop.is_set():
            raise
    finally:
        worker.close()
        ranks.close()
    return None


def _store(config: RunConfig, *, leads: bool) -> ObjectStore:
    """The run's object store: the configured one, else the run folder's; who commits sees that it can."""
    return (open_for_commits if leads else open_store)(config.store, config.run_folder())


def _has_stopped(connection: Connection, policy: int) -> bool:
    """True after the policy's Stop; asked before the slow imports, so that a restart ends at once."""
    return any(isinstance(raw.decoded_if_ours(), Stop) for raw in connection.read_topic("steps", {policy: 0}))


def _check_ranks(trainer: TrainerConfig, lanes: int) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1")) // trainer.sequence_parallel
    if not ranks or lanes % ranks:
        raise ConfigurationError(f"{ranks} ranks cannot share {lanes} lanes evenly; take a divisor of run.lanes")


if __name__ == "__main__":
    sys.exit(main())
