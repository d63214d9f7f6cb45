"""Two ranks of DeepSpeed ZeRO-3 that publish their shards after every step; run in a nursery.

Arguments STORE OUT STEPS: rank 0 also writes the gathered weights of every version to OUT/VERSION.npz.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from headrace.connectors.stores.local import LocalStore
from headrace.schemas.delta_layout import Layout
from headrace.trainers.backends.zero3 import zero3_shards
from headrace.trainers.ranks import Ranks
from headrace.trainers.sharded_publisher import ShardedPublisher


def main(arguments: Sequence[str]) -> None:
    """See the module's text."""
    store, out, steps = arguments
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    ranks = Ranks.from_environment(group=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 41), torch.nn.Tanh(), torch.nn.Linear(41, 7, bias=False))
    shapes = {name: np.empty(tuple(p.shape), np.uint16) for name, p in model.named_parameters()}
    layout = Layout.of(shapes, dict.fromkeys(shapes, "bfloat16"), segment_bytes=512)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    publisher = ShardedPublisher(LocalStore(store), "first", "main", layout, ranks, full_every=3)
    parameters = dict(engine.module.named_parameters())
    head = None
    for version in range(int(steps)):
        assert all(p.numel() == 0 for p in parameters.values()), "nothing is sharded"
        shards = zero3_shards(parameters, ranks.rank)
        head = publisher.publish(shards, version=version, lineage=0, batch=version, parent=head)
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            if ranks.leads:
                whole = {n: p.detach().to(torch.bfloat16).view(torch.int16).numpy() for n, p in parameters.items()}
                np.savez(Path(out) / f"{version}.npz", **whole)
        inputs = torch.randn(4, 33, dtype=torch.bfloat16)
        loss = engine(inputs).float().square().mean()
        engine.backward(loss)
        engine.step()
    ranks.close()
