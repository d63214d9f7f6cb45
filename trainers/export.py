"""A trained model as a Hugging Face folder: published bf16 weights beside the original's config and tokenizer.

Goes in: what was published; comes out: a folder that ``from_pretrained`` loads, whole or not at all. Where adapters
were trained it holds the model with them added in, and in ``adapter`` the adapters alone, as peft reads them. As a
process (``python -m headrace.trainers.export``) it exports any version that the store has.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.connectors.adapters import SCALING, added, holds_adapters, modules_of
from headrace.connectors.checkpoint_file import write_checkpoint
from headrace.connectors.lifetime import exit_with
from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.image import load_image
from headrace.connectors.stores.open import open_store
from headrace.schemas.config import read_config
from headrace.schemas.delta_layout import Layout

if TYPE_CHECKING:
    from headrace.trainers.backends.backend import Weights

__all__ = ("export_model", "main")


def export_model(weights: "Weights", source: Path, target: Path) -> None:
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


def _with_adapters(weights: "Weights", source: Path) -> "Weights":
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    base = {name: p.detach() for name, p in model.named_parameters()}
    changed = added(weights, base, lambda name: base[name].float().numpy())
    whole = {name: torch.from_numpy(changed[name]).bfloat16() if name in changed else p for name, p in base.items()}
    return {name: p.contiguous().view(torch.int16).numpy().view(np.uint16) for name, p in whole.items()}


def _write_adapter(weights: "Weights", source: Path, folder: Path) -> None:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a version of a policy of a run; returns the exit code (``schemas.errors``)."""
    parser = argparse.ArgumentParser(prog="python -m headrace.trainers.export", description=export_model.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved config.json")
    parser.add_argument("--policy", required=True, help="name of the policy")
    parser.add_argument("--version", type=int, required=True, help="a version that is in the run's store")
    parser.add_argument("--target", type=Path, required=True, help="the folder to write")
    given = parser.parse_args(arguments)

    def export() -> None:
        config = read_config(given.config)
        chain = Chain(open_store(config.store, config.run_folder()), config.run.id, given.policy)
        image = load_image(chain, given.version)
        given.target.parent.mkdir(parents=True, exist_ok=True)
        export_model(image.layout.views(image.data), Path(config.policies[given.policy].model), given.target)

    return exit_with(export)


if __name__ == "__main__":
    sys.exit(main())
