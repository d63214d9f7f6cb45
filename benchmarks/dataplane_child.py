"""The process in which one measurement of the data plane runs: prints its cost as JSON.

In: a kind, a run's configuration, a broker, a count; out: seconds and CPU seconds for so many records.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from benchmarks.dataplane_assemble import bare, ours
from benchmarks.dataplane_clock import Cost
from benchmarks.dataplane_overhead import loop_passes, worker_passes
from headrace.connectors.kafka import Connection
from headrace.schemas.config import RunConfig

KINDS: dict[str, Callable[[RunConfig, Connection, int], Cost]] = {
    "ours": ours,
    "bare": bare,
    "worker": worker_passes,
    "loop": loop_passes,
}


def child(kind: str, config_json: str, bootstrap: str, count: str) -> None:
    """Measure and print."""
    config = RunConfig.model_validate_json(config_json)
    cost = KINDS[kind](config, Connection.of(config.kafka, config.run.id, bootstrap), int(count))
    print(json.dumps(asdict(cost)), flush=True)
