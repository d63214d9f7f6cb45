"""A rank that trains a few batches of made-up items without a broker; run alone or under torchrun.

``python rank_probe.py MODEL OUT BACKEND STAGE PRECISION STEPS MICRO``: of two ranks, rank 1 gets
only one group of every batch (skewed lanes). Rank 0 writes the published weights and metrics to OUT.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from trainer_feed import make_config, make_items

from headrace.schemas.config import RunConfig
from headrace.schemas.parts import ManifestMember
from headrace.schemas.records import Item, Manifest
from headrace.trainers.backends.backend import Backend
from headrace.trainers.backends.open import open_backend
from headrace.trainers.ranks import Ranks
from headrace.trainers.update import Learner


def manifest_of(batch: int, items: list[Item]) -> Manifest:
    """A Manifest with the global counts of the items."""
    return Manifest(
        policy=0,
        batch=batch,
        start_version=batch - 1,
        since_version=0,
        fresh_groups=len({item.group for item in items}),
        replayed_groups=0,
        tokens=sum(item.length for item in items),
        sequences=len(items),
        trajectories=len(items),
        groups=len({item.group for item in items}),
        composed_ms=0,
        members=[
            ManifestMember(group=i.group, replica=i.replica, use=0, lane=0, oldest_version=i.oldest_version)
            for i in items
        ],
    )


def share(items: list[Item], rank: int, size: int) -> list[Item]:
    """This rank's items: rank 1 of several gets the first group only, the others share the rest."""
    groups = list(dict.fromkeys(item.group for item in items))
    if size == 1:
        return items
    mine = groups[:1] if rank == 1 else groups[1:]
    return [item for item in items if item.group in mine]


def train(config: RunConfig, backend: Backend, ranks: Ranks, steps: range) -> dict[str, float]:
    """Train the batches numbered ``steps``; the last metrics with the loss."""
    learner = Learner(config, "main", backend, ranks)
    found: dict[str, float] = {}
    for batch in steps:
        items = make_items(batch, groups=4, size=4, version=batch - 1, seed=3)
        learned = learner.train(share(items, ranks.rank, ranks.size), manifest_of(batch, items), batch - 1)
        found = {**learned.metrics, "loss": learned.loss}
    return found


def main(arguments: Sequence[str]) -> None:
    """See the module's text."""
    model, out, backend_name, stage, precision, steps, micro = arguments
    more = json.loads(os.environ.get("PROBE_TRAINER", "{}"))
    config = make_config(
        Path(model),
        Path(out).parent,
        "probe",
        backend=backend_name,
        zero_stage=int(stage),
        precision=precision,
        micro_batch_tokens=int(micro),
        **more,
    )
    torch.manual_seed(0)
    ranks = Ranks.from_environment(group=backend_name == "deepspeed")
    backend = open_backend(config.trainer_of("main"), model, ranks)
    metrics = train(config, backend, ranks, range(1, int(steps) + 1))
    weights = backend.weights()
    if ranks.leads:
        np.savez(out, **weights)
        Path(out).with_suffix(".json").write_text(json.dumps(metrics))
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1:])
