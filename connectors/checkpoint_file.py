"""Writes weights as a Hugging Face checkpoint folder, without torch.

Goes in: raw bits by checkpoint name and the folder of the model they belong to; comes out: a folder with
``model.safetensors`` and that model's configuration and tokenizer, which ``from_pretrained`` loads.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.delta_layout import Layout
from headrace.schemas.errors import ConfigurationError

__all__ = ("write_checkpoint",)

_NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint8": "U8",
    "int8": "I8",
    "bool": "BOOL",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}
_BESIDE = {".json", ".txt", ".model", ".jinja"}


def write_checkpoint(
    target: Path, layout: Layout, weights: Mapping[str, NDArray[Any]], model: Path | None, metadata: Mapping[str, str]
) -> None:
    """Write ``target``/model.safetensors and copy configuration and tokenizer files from ``model``.

    weights: name -> raw bits (uint16 for bfloat16) for every tensor of the layout. model: a model folder, None for
    weights alone. metadata: strings for the file's header. Raises ConfigurationError when ``target`` holds files or
    ``model`` is no model folder.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target} exists and is not an empty folder: choose another one")
    if model is not None and not (model / "config.json").is_file():
        raise ConfigurationError(f"{model} is no model folder: it has no config.json; name it with --model")
    target.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for tensor in layout.tensors:
        nbytes = tensor.size * tensor.width
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (target / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in layout.tensors:
            file.write(np.ascontiguousarray(weights[tensor.name]).reshape(-1).view(np.uint8).data)
    if model is not None:
        for path in sorted(model.iterdir()):
            if path.is_file() and path.suffix in _BESIDE and not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
