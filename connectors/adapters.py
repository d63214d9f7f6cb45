"""Low-rank adapters as they are published: two matrices a module under peft's names, and the scaling of their product.

Goes in: a version that holds adapters, and the weights that they were trained on; comes out: the weights with the
adapters added in. A version that holds weights is passed on as it is.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import ConfigurationError

__all__ = ("SCALING", "added", "holds_adapters", "modules_of")

SCALING = "lora_scaling"
"""Name of the one number, bfloat16 [1], by which the product of an adapter's matrices is multiplied."""

_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def holds_adapters(weights: Mapping[str, Any]) -> bool:
    """Whether a version holds adapters instead of weights."""
    return SCALING in weights


def modules_of(weights: Mapping[str, Any]) -> list[str]:
    """The modules that have an adapter, by the model's own names, in order."""
    return [name.removeprefix(_PREFIX).removesuffix(_DOWN) for name in weights if name.endswith(_DOWN)]


def added(
    weights: Mapping[str, NDArray[Any]], base: Collection[str], get: Callable[[str], NDArray[Any]]
) -> dict[str, NDArray[np.float32]]:
    """name -> float32 ``base + scaling * up @ down`` for every weight with an adapter.

    weights: a version with adapters, bits of bfloat16 in uint16. base: names of the model's weights. get: a weight as
    float32. Raises ConfigurationError when an adapter fits no weight, or lacks a matrix.
    """
    scaling = float(_floats(weights[SCALING])[0])
    out = {}
    for module in modules_of(weights):
        name = f"{module}.weight"
        down, up = (weights.get(_PREFIX + module + end) for end in (_DOWN, _UP))
        if down is None or up is None:
            raise ConfigurationError(f"the version has one matrix of the adapter of {module}, not both")
        product = _floats(up) @ _floats(down)
        whole = get(name) if name in base else None
        if whole is None or product.shape != whole.shape:
            found = "missing" if whole is None else f"{whole.shape}"
            raise ConfigurationError(
                f"the adapter of {module} is {product.shape}, the model's weight {found}; trainer and rollout must "
                "name the same model folder"
            )
        out[name] = whole + np.float32(scaling) * product
    return out


def _floats(bits: NDArray[Any]) -> NDArray[np.float32]:
    if bits.dtype != np.uint16:
        return bits.astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)
