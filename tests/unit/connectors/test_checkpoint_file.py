"""Checkpoints written without torch: read back by safetensors itself, beside the files of the model they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.connectors.checkpoint_file import write_checkpoint
from headrace.schemas.delta_layout import Layout
from headrace.schemas.errors import ConfigurationError

DTYPES = {
    "w.bf16": "bfloat16", "w.f32": "float32", "w.f16": "float16", "w.i64": "int64", "w.bool": "bool", "w.u8": "uint8",
    "w.scalar": "float32", "w.none": "bfloat16",
}  # fmt: skip


def _weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "w.bf16": rng.integers(0, 1 << 16, (3, 5), dtype=np.uint16),
        "w.f32": rng.standard_normal((4,)).astype(np.float32),
        "w.f16": rng.standard_normal((2, 2)).astype(np.float16),
        "w.i64": np.arange(3),
        "w.bool": np.array([True, False, True]),
        "w.u8": np.arange(7, dtype=np.uint8),
        "w.scalar": np.array(2.5, np.float32),
        "w.none": np.zeros((0, 4), np.uint16),
    }


def _model(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "vocab.txt", "spiece.model", "chat_template.jinja"):
        (folder / name).write_text(f'"{name}"')
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "notes.md"):
        (folder / name).write_text("old weights")
    (folder / "sub.json").mkdir()
    return folder


def test_safetensors_reads_every_bit_back(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    weights = _weights()
    layout = Layout.of(weights, DTYPES)
    write_checkpoint(tmp_path / "out", layout, weights, None, {"version": "7"})
    path = tmp_path / "out" / "model.safetensors"
    with safetensors.safe_open(str(path), "np") as file:
        assert set(file.keys()) == set(weights)
        assert file.metadata() == {"format": "pt", "version": "7"}
        for name in ("w.f32", "w.f16", "w.i64", "w.bool", "w.u8", "w.scalar"):
            assert np.array_equal(file.get_tensor(name), weights[name])
        assert file.get_slice("w.bf16").get_shape() == [3, 5]
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0, "tensors begin at a multiple of 8 bytes"
    header = json.loads(data[8 : 8 + size])
    for name, array in weights.items():
        start, end = header[name]["data_offsets"]
        assert data[8 + size + start : 8 + size + end] == array.tobytes()
    assert max(h["data_offsets"][1] for n, h in header.items() if n != "__metadata__") == len(data) - 8 - size


def test_the_models_configuration_and_tokenizer_come_along_and_its_weights_do_not(tmp_path: Path) -> None:
    weights = {"w": np.zeros(4, np.uint16)}
    layout = Layout.of(weights, {"w": "bfloat16"})
    write_checkpoint(tmp_path / "out", layout, weights, _model(tmp_path / "model"), {})
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {
        "model.safetensors", "config.json", "tokenizer.json", "vocab.txt", "spiece.model", "chat_template.jinja",
    }  # fmt: skip
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != b"old weights"


def test_a_strided_tensor_is_written_in_its_own_order(tmp_path: Path) -> None:
    weights = {"w": np.arange(6, dtype=np.uint16).reshape(2, 3).T}
    layout = Layout.of(weights, {"w": "bfloat16"})
    write_checkpoint(tmp_path / "out", layout, weights, None, {})
    assert (tmp_path / "out" / "model.safetensors").read_bytes()[-12:] == weights["w"].tobytes()


def test_an_empty_folder_is_taken_and_what_holds_files_or_no_model_is_refused(tmp_path: Path) -> None:
    weights = {"w": np.zeros(4, np.uint16)}
    layout = Layout.of(weights, {"w": "bfloat16"})
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "empty", layout, weights, None, {})
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        write_checkpoint(tmp_path / "empty", layout, weights, None, {})
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        write_checkpoint(tmp_path / "file", layout, weights, None, {})
    with pytest.raises(ConfigurationError, match="is no model folder"):
        write_checkpoint(tmp_path / "new", layout, weights, tmp_path / "nowhere", {})
    assert not (tmp_path / "new").exists(), "refused before anything was written"


def test_transformers_loads_what_was_written(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).state_dict()
    state.pop("lm_head.weight")
    weights = {name: tensor.view(torch.uint16).numpy() ^ np.uint16(1) for name, tensor in state.items()}
    layout = Layout.of(weights, dict.fromkeys(weights, "bfloat16"))
    write_checkpoint(tmp_path / "out", layout, weights, tiny_model, {})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    for name, bits in weights.items():
        assert np.array_equal(again[name].view(torch.uint16).numpy(), bits), name
