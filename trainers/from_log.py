"""``python -m headrace.trainers.from_log``: train again from a run's recorded batches, without rollouts.

In: the batches and Manifests of a recorded run, its configuration or another loss's; out: checkpoints, a line of
metrics and a digest of the weights for every batch, the final model, all in a folder of its own. The recorded run is
only read. On plain torch with the recorded settings the weights are bit-equal to the recorded versions.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal, exit_with
from headrace.schemas.config import read_config
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.same_tokenizer import check_tokenizer

__all__ = ("main",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and train; returns the exit code (``schemas.errors``)."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.trainers.from_log", description="Train one policy from recorded batches."
    )
    parser.add_argument("--config", required=True, help="configuration of this training (config.json of its folder)")
    parser.add_argument("--recorded", required=True, help="the recorded run's folder")
    parser.add_argument("--policy", required=True, help="the policy to train")
    parser.add_argument("--bootstrap", required=True, help="Kafka address at which the recorded topics can be read")
    parser.add_argument("--first", type=int, default=1, help="the first batch to train with this configuration")
    parser.add_argument("--last", type=int, default=0, help="the last batch; 0: the last that the run has trained")
    parser.add_argument("--back-to", type=int, default=-1, help="go on from a checkpoint at or before this batch")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when standard input closes")
    given = parser.parse_args(arguments)
    stop = StopSignal().listen(with_parent=given.exit_with_parent)
    code = exit_with(lambda: _train(given, stop))
    sys.stderr.flush()
    return code


def _train(given: argparse.Namespace, stop: StopSignal) -> None:
    config, recorded = read_config(given.config), read_config(Path(given.recorded) / "config.json")
    if given.policy not in recorded.policies:
        raise ConfigurationError(f"--policy {given.policy}: the recorded run has {', '.join(recorded.policies)}")
    recorded = recorded.model_copy(
        update={"run": recorded.run.model_copy(update={"folder": str(Path(given.recorded).absolute().parent)})}
    )
    connection = Connection.of(recorded.kafka, recorded.run.id, given.bootstrap).patient(stop.is_set)
    connection.wait_for_broker()
    check_tokenizer(connection, config.policies[given.policy].model)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with stop.at_once():
        from headrace.trainers.backends.open import open_rank
        from headrace.trainers.lanes import Stopped
        from headrace.trainers.log_trainer import LogTrainer

        ranks, backend = open_rank(config, given.policy)
    worker = LogTrainer(
        config,
        recorded,
        given.policy,
        connection=connection,
        backend=backend,
        ranks=ranks,
        stop=stop,
        span=(given.first, given.last),
        back_to=given.back_to,
    )
    try:
        worker.run()
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
    finally:
        worker.close()
        ranks.close()


if __name__ == "__main__":
    sys.exit(main())
