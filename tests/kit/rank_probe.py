"""A rank that trains a few batches of made-up items without a broker; run alone or under torchrun.

``python rank_probe.py MODEL OUT BACKEND STAGE PRECISION STEPS MICRO``: of two ranks, rank 1 gets
only one group of every batch (skewed lanes). Rank 0 writes the published weights and metrics to OUT, and the whole
gradient of the first update beside it (OUT.gradient.npz). Where ranks hold shards, they are put together and compared
with the gathered weights.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    """This part's items: part 1 of several gets the first group only, the others share the rest."""
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
        mine = share(items, ranks.data_rank, ranks.data_size)
        learned = learner.train(mine, manifest_of(batch, items), batch - 1)
        found = {**learned.metrics, "loss": learned.loss}
    return found


class Recording:
    """A backend that remembers the whole gradient of its first update, by published name."""

    def __init__(self, backend: Any, ranks: Ranks) -> None:
        self._backend, self._ranks = backend, ranks
        self.gradient: dict[str, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, lr: float) -> Any:
        """Remember, then step."""
        if not self.gradient:
            self.gradient = self._whole()
        return self._backend.step(lr)

    def _whole(self) -> dict[str, np.ndarray]:
        if hasattr(self._backend, "_total"):
            total = self._backend._total.clone()
            self._ranks.sum_tensor(total)
            parts = total.split([shape.numel() for _, shape in self._backend._shapes])
            names = [name for name, _ in self._backend._shapes]
            return {name: part.numpy() for name, part in zip(names, parts, strict=True)}
        from deepspeed.utils import safe_get_full_grad

        found = {name: (p, safe_get_full_grad(p)) for name, p in self._backend._named}
        assert all(g is not None for _, g in found.values()), "a weight has no gradient"
        return {name: g.detach().float().flatten().numpy() for name, (_, g) in found.items()}


def put_together(backend: Backend, ranks: Ranks) -> bool:
    """Whether the shards of all ranks are the gathered weights, bit by bit; True where nothing is sharded."""
    shards, weights = backend.shards(), backend.weights()
    if shards is None:
        return True
    every = ranks.gather({name: (one.start, one.bits.copy()) for name, one in shards.items()})
    if not ranks.leads:
        return True
    for name, bits in weights.items():
        whole = np.concatenate([part[name][1] for part in sorted(every, key=lambda part: part[name][0])])
        if not np.array_equal(whole, bits.ravel()):
            return False
    return True


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
    trainer = config.trainer_of("main")
    ranks = Ranks.from_environment(group=backend_name == "deepspeed", sharing=trainer.sequence_parallel)
    backend: Any = Recording(open_backend(trainer, model, ranks), ranks)
    metrics = train(config, backend, ranks, range(1, int(steps) + 1))
    weights = backend.weights()
    metrics["sharded"] = float(backend.shards() is not None)
    metrics["shards_equal"] = float(put_together(backend, ranks))
    if ranks.leads:
        np.savez(out, **weights)
        np.savez(Path(out).with_suffix(".gradient.npz"), **backend.gradient)
        Path(out).with_suffix(".json").write_text(json.dumps(metrics))
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1:])
