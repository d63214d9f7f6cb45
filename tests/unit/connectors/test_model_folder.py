"""Model folders: the digest of what decides how text becomes tokens, without torch; stop tokens; refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.connectors.model_folder import ModelFolder, tokenizer_digest
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Message
from headrace.schemas.records import Prompt


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def _edit(path: Path, **over: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **over}))


def test_the_digest_needs_neither_torch_nor_transformers(tiny_model: Path) -> None:
    code = (
        "import sys; from headrace.connectors.model_folder import tokenizer_digest; "
        f"print(tokenizer_digest({str(tiny_model)!r})); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == tokenizer_digest(tiny_model)


def test_the_digest_survives_saving_again_and_tells_what_matters(tiny_model: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    same = tokenizer_digest(tiny_model)
    saved = AutoTokenizer.from_pretrained(folder)
    saved.padding_side = "left"
    saved.save_pretrained(folder)
    assert tokenizer_digest(folder) == same
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    other = tokenizer_digest(folder)
    _edit(folder / "generation_config.json", eos_token_id=[2, 7])
    third = tokenizer_digest(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    _edit(folder / "tokenizer.json", model=tokenizer["model"])
    assert len({same, other, third, tokenizer_digest(folder)}) == 4


def test_stop_tokens_and_refusals(folder: Path, tmp_path: Path) -> None:
    assert ModelFolder(folder).stop_token_ids == (2,)
    _edit(folder / "generation_config.json", eos_token_id=[2, 7])
    assert ModelFolder(folder).stop_token_ids == (2, 7)
    (folder / "generation_config.json").unlink()
    assert ModelFolder(folder).stop_token_ids == (2,)
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        ModelFolder(tmp_path / "none")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match=r"no tokenizer\.json"):
        tokenizer_digest(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read as JSON"):
        ModelFolder(folder).stop_token_ids  # noqa: B018


def test_messages_go_through_the_chat_template(tiny_model: Path) -> None:
    folder = ModelFolder(tiny_model)
    fields: dict[str, Any] = {"prompt_id": "1", "stream": "s", "dataset": "d", "row": 0, "epoch": 0, "position": 0}
    chat = Prompt(**fields, messages=[Message(role="user", content="21")])
    assert folder.encode(chat).tolist() == folder.encode(Prompt(**fields, prompt="21=")).tolist()


def test_tools_thinking_and_refusals_of_a_template(tmp_path: Path) -> None:
    from chat_policy import chat_folder, rendered

    folder = ModelFolder(chat_folder(tmp_path))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "ü"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>hm</think>a", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
        {"role": "user", "content": "and?"},
    ]
    text = folder.render(messages, tools)
    assert text == rendered(messages, tools), "the kit renders as transformers does"
    assert "hm" not in text and text.endswith("<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\nTools:")
    assert folder.detokenize(folder.tokenize(text)) == text
    assert folder.decode(folder.tokenize("a<|im_end|>")) == "a"
    with pytest.raises(ValueError, match="refuses the messages"):
        folder.render([{"role": "assistant", "content": None}, {"role": "user", "content": "q"}])
