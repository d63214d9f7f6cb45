"""What runs inside vLLM's workers: installs weights in checkpoint coordinates and reads back what is loaded.

vLLM imports this module in every worker (``worker_extension_cls``), before it loads the model. Goes in: files of
``vllm_weights``; comes out: a model with exactly those weights. On CPU vLLM packs linear weights at load, after which
updates fail or, with tied embeddings, leave the old LM head in force; so the packing is left out. Elsewhere the module
may be imported too, and then loads no vLLM.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from headrace.connectors.engines.vllm_weights import BACKEND

if TYPE_CHECKING:
    import torch

__all__ = ("WeightWorker", "install_file", "read_back", "refuse_packed", "register")


def register() -> None:
    """Make the weight transfer backend ``headrace`` known to the vLLM of this process, and leave its packing out."""
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # A private name of the engine, changed because there is no setting for it; on other platforms it is never called.
    layer_utils.dispatch_cpu_unquantized_gemm = _keep_plain
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _backend())


def _backend() -> type:
    """The backend's class; vLLM's own base classes are there only in its workers."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
        """Nothing has to be agreed on before the first update."""

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
        """An update as ``vllm_weights.HandOver.prepare`` describes it (see ``install_file``)."""

        path: str = ""
        version: int = -1
        shapes: dict[str, list[int]] = field(default_factory=dict)
        dtypes: dict[str, str] = field(default_factory=dict)
        digests: dict[str, str] = field(default_factory=dict)

    class Weights(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
        """Parameters are changed in place, so there is nothing to prepare, to finish or to release."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        supports_draft_weight_update = False

        def init_transfer_engine(self, init_info: Any) -> None:
            refuse_packed(self.model)

        def start_weight_update(self) -> None:
            pass

        def update_weights(self, update_info: dict[str, Any]) -> None:
            import torch

            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: Any) -> None:
            install_file(self.model, update_info)

        def finish_weight_update(self) -> None:
            pass

        def shutdown(self) -> None:
            pass

    return Weights


def refuse_packed(model: "torch.nn.Module") -> None:
    """Raise RuntimeError for a model whose weights are not where its parameters say."""
    packed = [name for name, module in model.named_modules() if _is_packed(module)]
    if packed:
        raise RuntimeError(
            f"weights of {', '.join(packed[:3])} were packed when vLLM loaded the model, so updates would not reach "
            "them; start vLLM with the arguments of vllm_weights.engine_arguments"
        )


def install_file(model: Any, update: Any) -> None:
    """Install an update's tensors one at a time, then read back those of which digests came along.

    update: path of a safetensors file with ``NAME#new`` (values) and, where only some changed, ``NAME#at`` (flat
    positions); shapes and dtypes of whole tensors; digests (xxh3-128) of whole tensors after the update. Raises
    RuntimeError when what is loaded is not what was sent.
    """
    import torch
    from safetensors import safe_open
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    with safe_open(update.path, "pt") as file:
        names = set(file.keys())
        for name in update.shapes:
            if f"{name}#new" not in names:
                continue
            values = file.get_tensor(f"{name}#new")
            some = f"{name}#at" in names
            where = file.get_tensor(f"{name}#at") if some else torch.arange(values.numel())
            shape = tuple(update.shapes[name])
            patch = CheckpointWeightPatch(name, shape, values.dtype, values.reshape(-1), where)
            # Positions come from a comparison: they ascend, so they are unique.
            load_checkpoint_weight_patches(model, [patch], validate_unique_indices=False)
    for name, digest in update.digests.items():
        found = read_back(model, name, tuple(update.shapes[name]), update.dtypes[name])
        if found is None:
            raise RuntimeError(f"{name} cannot be read back: its loader copies, or a part lies on another worker")
        if _digest(found) != digest:
            raise RuntimeError(f"{name} of version {update.version} is not what was sent")


class WeightWorker:
    """Mixed into vLLM's worker: what ``collective_rpc`` may ask for."""

    model_runner: Any

    def loaded_digests(self, shapes: dict[str, list[int]], dtypes: dict[str, str]) -> dict[str, str]:
        """xxh3-128 of the tensors that are loaded, in checkpoint coordinates; those not wholly here are left out."""
        model = self.model_runner.model
        return dict(_digests(model, shapes, dtypes))

    def follow_owner(self, owner: int) -> None:
        """End with the process ``owner``, which started the engine, however that ends; vLLM would go on without it."""
        threading.Thread(target=_end_with, args=(owner, os.getppid()), name="owner", daemon=True).start()


def read_back(model: Any, name: str, shape: tuple[int, ...], dtype: str) -> "torch.Tensor | None":
    """A checkpoint tensor as the model has it loaded; None when it is not wholly in this worker.

    model: a module of vLLM's with ``load_weights``, which is run with every final copy turned round: from the parameter
    into the checkpoint tensor.
    """
    import torch

    scratch = torch.full(shape, float("nan"), dtype=getattr(torch, dtype))
    real = torch.Tensor.copy_

    def reversed_copy(
        destination: "torch.Tensor", source: "torch.Tensor", non_blocking: bool = False
    ) -> "torch.Tensor":
        real(source, destination.to(source.device, source.dtype))
        return destination

    torch.Tensor.copy_ = reversed_copy  # type: ignore[method-assign,assignment]
    try:
        with torch.no_grad():
            model.load_weights([(name, scratch)])
    finally:
        torch.Tensor.copy_ = real  # type: ignore[method-assign]
    return None if bool(torch.isnan(scratch).any()) else scratch


def _end_with(owner: int, parent: int) -> None:
    """Wait for the end of ``owner``, then end the engine's core, if that is our parent, and this process."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(owner)], [], [])
    if parent != owner:
        with suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os._exit(1)


def _digests(model: Any, shapes: dict[str, list[int]], dtypes: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, shape in shapes.items():
        found = read_back(model, name, tuple(shape), dtypes[name])
        if found is not None:
            yield name, _digest(found)


def _digest(tensor: "torch.Tensor") -> str:
    import torch

    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().data)


def _is_packed(module: "torch.nn.Module") -> bool:
    """Whether a CPU layer computes with a packed copy of its weight."""
    import torch

    used: Callable[..., Any] | None = getattr(module, "cpu_linear", None)
    return used is not None and used is not torch.nn.functional.linear


def _keep_plain(layer: "torch.nn.Module", remove_weight: bool) -> None:
    """In place of vLLM's packing on CPU: compute with the parameter itself."""
    import torch

    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


if "vllm" in sys.modules:
    register()
