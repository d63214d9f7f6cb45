"""The final model as a Hugging Face folder: the published bf16 weights beside the original's config and tokenizer.

Goes in: what was published last; comes out: a folder that ``from_pretrained`` loads, whole or not at all. Where
adapters were trained it holds the model with them added in, and in ``adapter`` the adapters alone, as peft reads them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from headrace.connectors.adapters import SCALING, added, holds_adapters, modules_of
from headrace.connectors.checkpoint_file import write_checkpoint
from headrace.schemas.delta_layout import Layout
from headrace.trainers.backends.backend import Weights

__all__ = ("export_model",)


def export_model(weights: Weights, source: Path, target: Path) -> None:
    """Write ``target`` whole or not at all; ``source`` is the folder that training began from.

    A target of an earlier attempt is replaced.
    """
    beside = target.parent / f".{target.name}.part"
    shutil.rmtree(beside, ignore_errors=True)
    whole = _with_adapters(weights, source) if holds_adapters(weights) else weights
    write_checkpoint(beside, Layout.of(whole, dict.fromkeys(whole, "bfloat16")), whole, source, {})
    config = json.loads((source / "config.json").read_text("utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if whole is not weights:
        _write_adapter(weights, source, beside / "adapter")
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)


def _with_adapters(weights: Weights, source: Path) -> Weights:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    base = {name: p.detach() for name, p in model.named_parameters()}
    changed = added(weights, base, lambda name: base[name].float().numpy())
    whole = {name: torch.from_numpy(changed[name]).bfloat16() if name in changed else p for name, p in base.items()}
    return {name: p.contiguous().view(torch.int16).numpy().view(np.uint16) for name, p in whole.items()}


def _write_adapter(weights: Weights, source: Path, folder: Path) -> None:
    import torch

    matrices = {name: bits for name, bits in weights.items() if name != SCALING}
    write_checkpoint(folder, Layout.of(matrices, dict.fromkeys(matrices, "bfloat16")), matrices, None, {"format": "pt"})
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    rank = next(bits.shape[0] for name, bits in matrices.items() if name.endswith(".lora_A.weight"))
    scaling = torch.from_numpy(weights[SCALING].view(np.int16).copy()).view(torch.bfloat16).item()
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": rank,
        "lora_alpha": scaling * rank,
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in modules_of(weights)}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
