"""The exported folder is a whole Hugging Face model."""

import json
from pathlib import Path

import pytest
import torch
from trainer_feed import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.backend import Weights
from headrace.trainers.export import export_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def weights_of(folder: Path, add: float = 0.0) -> Weights:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {n: (p.detach() + add).to(torch.bfloat16).view(torch.uint16).numpy() for n, p in model.named_parameters()}


def test_a_model_and_its_tokenizer_load_again(source: Path, tmp_path: Path) -> None:
    weights = weights_of(source, add=0.5)
    export_model(weights, source, tmp_path / "model" / "main")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model" / "main")
    assert model.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().view(torch.uint16), torch.from_numpy(weights[name])), name
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr(), "still tied"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model" / "main")
    assert (
        tokenizer("12=", add_special_tokens=False).input_ids == AutoTokenizer.from_pretrained(source)("12=").input_ids
    )


def test_an_earlier_export_is_replaced_whole(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "main"
    export_model(weights_of(source), source, target)
    (target / "stray.json").write_text("{}")
    export_model(weights_of(source, add=1.0), source, target)
    assert not (target / "stray.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["main"], "nothing is left beside it"
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_source_without_a_model_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        export_model(weights_of(source), tmp_path, tmp_path / "main")
