"""The final model as a Hugging Face folder: the published bf16 weights beside the original's config and tokenizer."""

import json
import shutil
from pathlib import Path

import torch

from headrace.trainers.backends.backend import Weights

__all__ = ("export_model",)

_WEIGHTS = {".safetensors", ".bin", ".pt", ".h5", ".msgpack"}


def export_model(weights: Weights, source: Path, target: Path) -> None:
    """Write ``target`` whole or not at all; ``source`` is the folder that training began from.

    A target of an earlier attempt is replaced.
    """
    from safetensors.torch import save_file

    beside = target.parent / f".{target.name}.part"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHTS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, beside / path.name)
    config = json.loads((source / "config.json").read_text("utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    tensors = {name: torch.from_numpy(bits.copy()).view(torch.bfloat16) for name, bits in weights.items()}
    save_file(tensors, beside / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
