"""What the weights of a model folder must look like, and the way from a published version to whole weights.

Goes in: a version as it was published, weights or adapters; comes out: every weight of the model by its checkpoint
name, checked before an engine takes any of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.connectors.adapters import added, holds_adapters
from headrace.connectors.engines.engine import WeightsRefused

__all__ = ("ModelWeights", "bits_of", "tensor_of")


class ModelWeights:
    """The tensors of one model. model: any instance of it in transformers; only names and shapes are looked at."""

    def __init__(self, folder: Path, model: Any) -> None:
        self._folder = folder
        tensors = model.state_dict(keep_vars=True)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._same = {name: id(tensor) for name, tensor in tensors.items()}
        self._base: dict[str, Any] = {}

    @classmethod
    def of_folder(cls, folder: Path) -> "ModelWeights":
        """Of a model that is described by a folder's configuration; its weights are not read."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        build: Any = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            return cls(folder, build(AutoConfig.from_pretrained(folder)))

    def whole(self, weights: Mapping[str, Any], version: int) -> Mapping[str, Any]:
        """Arrays or torch tensors of a version; adapters are added to the weights of the model folder.

        Tied tensors may be given once. Raises WeightsRefused for a missing or unknown tensor or another shape, and
        ConfigurationError for an adapter that fits no weight.
        """
        if holds_adapters(weights):
            self._base = self._base or _folder_weights(self._folder)
            base = self._base
            weights = {**base, **added(weights, base, lambda name: base[name].float().numpy())}
        seen = {self._same[name] for name in weights if name in self._same}
        missing = [name for name, same in self._same.items() if same not in seen]
        unknown = [name for name in weights if name not in self._shapes]
        wrong = [
            f"{name} is {tuple(array.shape)}, the model has {self._shapes[name]}"
            for name, array in weights.items()
            if name in self._shapes and tuple(array.shape) != self._shapes[name]
        ]
        if missing or unknown or wrong:
            raise WeightsRefused(
                f"weights of version {version} do not fit the model: missing {missing[:3]}, unknown {unknown[:3]}, "
                f"shapes {wrong[:3]}; trainer and rollout must name the same model folder"
            )
        return weights


def _folder_weights(folder: Path) -> dict[str, Any]:
    """The weights of a model folder as torch tensors, rounded to bfloat16, which is what adapters are trained on."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return {name: p.detach() for name, p in model.named_parameters()}


def tensor_of(array: npt.NDArray[Any] | Any) -> Any:
    """A torch tensor of an array whose uint16 entries are the bits of bfloat16 numbers; tensors pass as they are."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    # snapshots are read-only, and torch warns of tensors over memory that must not be written
    own = np.require(array, requirements=["C", "W"])
    if own.dtype == np.uint16:
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)


def bits_of(array: npt.NDArray[Any] | Any) -> npt.NDArray[np.uint16]:
    """bfloat16 bits (uint16) of an array or tensor, rounded to the nearest even where it is finer; bits pass as are."""
    if isinstance(array, np.ndarray) and array.dtype == np.uint16:
        return array
    import torch

    bits: npt.NDArray[np.int16] = tensor_of(array).to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy()
    return bits.view(np.uint16)
