"""What one rank holds of parameters that DeepSpeed ZeRO 3 has cut into shards; nothing is gathered for it.

DeepSpeed keeps for every parameter a flat run of its elements a rank (``ds_tensor``), all runs of equal length, the
last ones padded, and the shape of the whole (``ds_shape``).
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from headrace.trainers.backends.backend import Shards, TensorShard

__all__ = ("full_shape", "sharded_over", "zero3_shards")


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The shape of the whole parameter, sharded or not."""
    return tuple(int(n) for n in getattr(parameter, "ds_shape", parameter.shape))


def sharded_over(parameters: Iterable[torch.nn.Parameter], ranks: int) -> bool:
    """Whether every parameter is cut over all ``ranks`` (under MiCS or hpZ groups of fewer hold a whole model each)."""
    return all(
        hasattr(p, "ds_tensor") and p.ds_tensor.numel() == -(-int(p.ds_numel) // ranks)  # type: ignore[attr-defined]
        for p in parameters
    )


def zero3_shards(named: Mapping[str, torch.nn.Parameter], rank: int) -> Shards:
    """What this rank holds, rounded to bfloat16; on a CPU in bfloat16 the bits are views of the live weights."""
    shards: dict[str, TensorShard] = {}
    for name, parameter in named.items():
        mine: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        whole = int(parameter.ds_numel)  # type: ignore[attr-defined]
        start = min(whole, rank * mine.numel())
        count = min(mine.numel(), whole - start)
        bits = mine.detach()[:count].to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
        shards[name] = TensorShard(start, bits)
    return shards
