"""What runs inside vLLM's workers: installs weights in checkpoint coordinates and reads back what is loaded.

vLLM imports this module in every worker (``worker_extension_cls``), before it loads the model. Goes in: files of
``vllm_weights``; comes out: a model with exactly those weights. On CPU vLLM packs linear weights at load, after which
updates fail or, with tied embeddings, leave the old LM head in force; so the packing is left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
import xxhash
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from headrace.connectors.engines.vllm_weights import BACKEND

__all__ = ("WeightWorker", "read_back")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on before the first update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """An update as ``vllm_weights.HandOver.prepare`` wrote it.

    path: a safetensors file with ``NAME#new`` (values) and, where only some changed, ``NAME#at`` (flat positions).
    shapes, dtypes: of whole tensors. digests: xxh3-128 of whole tensors after the update, for those to be read back.
    """

    path: str = ""
    version: int = -1
    shapes: dict[str, list[int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


class Weights(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """The weight transfer backend ``headrace``."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Refuse a model whose weights are not where its parameters say."""
        packed = [name for name, module in self.model.named_modules() if _is_packed(module)]
        if packed:
            raise RuntimeError(
                f"weights of {', '.join(packed[:3])} were packed when vLLM loaded the model, so updates would not "
                "reach them; start vLLM with worker_extension_cls of vllm_weights.engine_arguments"
            )

    def start_weight_update(self) -> None:
        """Nothing to prepare: initialised parameters are changed in place."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Install and, where digests came along, read back; returns when the device is done."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Install the file's tensors one at a time."""
        with safe_open(update_info.path, "pt") as file:
            names = set(file.keys())
            for name in update_info.shapes:
                if f"{name}#new" not in names:
                    continue
                values = file.get_tensor(f"{name}#new")
                some = f"{name}#at" in names
                where = file.get_tensor(f"{name}#at") if some else torch.arange(values.numel())
                shape = tuple(update_info.shapes[name])
                patch = CheckpointWeightPatch(name, shape, values.dtype, values.reshape(-1), where)
                # Positions come from a comparison: they ascend, so they are unique.
                load_checkpoint_weight_patches(self.model, [patch], validate_unique_indices=False)
        for name, digest in update_info.digests.items():
            found = read_back(self.model, name, tuple(update_info.shapes[name]), update_info.dtypes[name])
            if found is None:
                raise RuntimeError(f"{name} cannot be read back: its loader copies, or a part lies on another worker")
            if _digest(found) != digest:
                raise RuntimeError(f"{name} of version {update_info.version} is not what was sent")

    def finish_weight_update(self) -> None:
        """Nothing to finish."""

    def shutdown(self) -> None:
        """Nothing to release."""


class WeightWorker:
    """Mixed into vLLM's worker: what ``collective_rpc`` may ask for."""

    model_runner: Any

    def loaded_digests(self, shapes: dict[str, list[int]], dtypes: dict[str, str]) -> dict[str, str]:
        """xxh3-128 of the tensors that are loaded, in checkpoint coordinates; those not wholly here are left out."""
        model = self.model_runner.model
        return dict(_digests(model, shapes, dtypes))


def read_back(model: Any, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor | None:
    """A checkpoint tensor as the model has it loaded; None when it is not wholly in this worker.

    model: a module of vLLM's with ``load_weights``, which is run with every final copy turned round: from the parameter
    into the checkpoint tensor.
    """
    scratch = torch.full(shape, float("nan"), dtype=getattr(torch, dtype))
    real = torch.Tensor.copy_

    def reversed_copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        real(source, destination.to(source.device, source.dtype))
        return destination

    torch.Tensor.copy_ = reversed_copy  # type: ignore[method-assign,assignment]
    try:
        with torch.no_grad():
            model.load_weights([(name, scratch)])
    finally:
        torch.Tensor.copy_ = real  # type: ignore[method-assign]
    return None if bool(torch.isnan(scratch).any()) else scratch


def _digests(model: Any, shapes: dict[str, list[int]], dtypes: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, shape in shapes.items():
        found = read_back(model, name, tuple(shape), dtypes[name])
        if found is not None:
            yield name, _digest(found)


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().data)


def _is_packed(module: torch.nn.Module) -> bool:
    """Whether a CPU layer computes with a packed copy of its weight."""
    used: Callable[..., Any] | None = getattr(module, "cpu_linear", None)
    return used is not None and used is not torch.nn.functional.linear


def _keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    """In place of vLLM's packing on CPU: compute with the parameter itself."""
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


# A private name of the engine, changed because there is no setting for it; on other platforms it is never called.
layer_utils.dispatch_cpu_unquantized_gemm = _keep_plain
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Weights)
