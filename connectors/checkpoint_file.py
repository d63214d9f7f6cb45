"""Writes weights as a Hugging Face checkpoint folder, without torch.

Goes in: raw bits by checkpoint name and the folder of the model they belong to; comes out: a folder with
``model.safetensors`` and that model's configuration and tokenizer, which ``from_pretrained`` loads.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.delta_layout import Layout
from headrace.schemas.errors import ConfigurationError

__all__ = ("check_target", "write_checkpoint", "write_safetensors")

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
    ``model`` is no model folder, and OSError, leaving ``target`` empty, when it cannot be written.
    """
    check_target(target)
    if model is not None and not (model / "config.json").is_file():
        raise ConfigurationError(f"{model} is no model folder: it has no config.json; name it with --model")
    dtypes = {tensor.name: tensor.dtype for tensor in layout.tensors}
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_safetensors(target / "model.safetensors", {name: weights[name] for name in dtypes}, dtypes, metadata)
        for path in sorted(model.iterdir()) if model is not None else ():
            if path.is_file() and path.suffix in _BESIDE and not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
    except OSError:
        for path in target.iterdir() if target.is_dir() else ():
            with suppress(OSError):
                path.unlink()
        raise


def check_target(target: Path) -> None:
    """Raise ConfigurationError unless ``target`` is missing or an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target} exists and is not an empty folder: choose another one")


def write_safetensors(
    path: Path, arrays: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str], metadata: Mapping[str, str]
) -> None:
    """Write arrays to one file in the safetensors format, in the order given.

    arrays: name -> raw bits. dtypes: name -> torch's name of the dtype. metadata: strings for the header.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[dtypes[name]],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
