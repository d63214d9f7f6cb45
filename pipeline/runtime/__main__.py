"""The process that runs stages: ``python -m headrace.pipeline.runtime --config FILE --instance NAME``.

One thread per sub-topology, each with a worker of its own. Ends with 0 when all their tasks are finished, or when asked
to stop; the first thread that dies ends the process with its error (75 superseded, 78 a person must act, 1 else).
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal, exit_with
from headrace.connectors.schema_ids import take_schema_ids
from headrace.connectors.transaction import Watchdog
from headrace.pipeline.flow import STAGES
from headrace.pipeline.runtime.metrics import Registry, serve_if_asked
from headrace.pipeline.runtime.worker import Worker
from headrace.schemas.config import RunConfig, read_config
from headrace.schemas.errors import ConfigurationError

__all__ = ("main", "run_stages")


def run_stages(
    config: RunConfig, connection: Connection, instance: str, stages: Sequence[str], stop: StopSignal
) -> None:
    """Run the workers of the sub-topologies in ``stages`` until all are finished or ``stop`` is set.

    Raises what the first failing worker raised.
    """
    metrics, watchdog = Registry(), Watchdog(connection.answers)
    serve_if_asked(metrics)
    with ThreadPoolExecutor(len(stages), "stage") as pool:
        running = {
            pool.submit(
                Worker(
                    connection, config, name, instance, STAGES[name], stop=stop, metrics=metrics, watchdog=watchdog
                ).run
            )
            for name in stages
        }
        while running:
            ended, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            failed = [error for future in ended if (error := future.exception()) is not None]
            if failed:
                stop.set(f"a worker failed: {failed[0]}")
                raise failed[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m headrace.pipeline.runtime", description=__doc__)
    parser.add_argument("--config", required=True, help="resolved configuration of the run (config.json)")
    parser.add_argument("--instance", required=True, help="name of this process, the same at every restart")
    parser.add_argument("--stages", default=",".join(STAGES), help="sub-topologies to run, by comma")
    parser.add_argument("--bootstrap", help="Kafka's HOST:PORT, over kafka.bootstrap")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when standard input closes")
    options = parser.parse_args(arguments)

    def run() -> None:
        logging.basicConfig(
            stream=sys.stderr,
            level=os.environ.get("HEADRACE_LOG", "INFO"),
            format="%(asctime)s %(levelname)s %(message)s",
        )
        config = read_config(options.config)
        stages = [name for name in options.stages.split(",") if name]
        for name in stages:
            if name not in STAGES:
                raise ConfigurationError(f"no stage {name!r}; stages are {', '.join(STAGES)}")
        stop = StopSignal().listen(with_parent=options.exit_with_parent)
        connection = Connection.of(config.kafka, config.run.id, options.bootstrap, role="operators")
        take_schema_ids(connection.patient(stop.is_set), config.registry)
        run_stages(config, connection, options.instance, stages, stop)

    return exit_with(run)


if __name__ == "__main__":
    sys.exit(main())
